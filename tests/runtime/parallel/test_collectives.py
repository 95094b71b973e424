"""Collectives on rows, now or later, are what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from runtime.parallel import collectives as c

if TYPE_CHECKING:
    from tests.ranks import RankPool


def all_of_them() -> dict[str, torch.Tensor]:
    group, rank = dist.group.WORLD, dist.get_rank()
    x = torch.arange(8.0).reshape(4, 2) + 100 * rank
    spread = x.t()  # not contiguous
    return {
        "gathered": c.gather_rows(spread, group),
        "gathered later": c.gather_rows_later(spread, group)(),
        "scattered": c.scatter_sum(x, group),
        "scattered later": c.scatter_sum_later(x, group)(),
        "summed": c.sum_over(x.clone(), group),
        "summed later": c.sum_over_later(x.clone(), group)(),
        "exchanged": c.exchange(x, group),
        "exchanged unevenly": c.exchange(x, group, [1, 3], [1, 1] if rank == 0 else [3, 3]),
    }


def test_collectives_on_rows(ranks: RankPool) -> None:
    x = [torch.arange(8.0).reshape(4, 2) + 100 * rank for rank in range(2)]
    for rank, found in enumerate(ranks.run(2, all_of_them)):
        gathered = torch.cat([part.t() for part in x])
        uneven = [part[:1] if rank == 0 else part[1:] for part in x]
        wanted = {
            "gathered": gathered,
            "scattered": (x[0] + x[1]).chunk(2)[rank],
            "summed": x[0] + x[1],
            "exchanged": torch.cat([part.chunk(2)[rank] for part in x]),
            "exchanged unevenly": torch.cat(uneven),
        }
        for name, right in wanted.items():
            assert torch.equal(found[name], right), name
        for name in ("gathered", "scattered", "summed"):
            assert torch.equal(found[f"{name} later"], found[name]), name
