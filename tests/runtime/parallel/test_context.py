"""How a sequence is dealt out to context-parallel ranks and put together again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from runtime.parallel.context import (
    ContextParallel,
    gather_natural,
    pass_on_later,
    scatter_natural,
    to_heads,
    to_tokens,
)

if TYPE_CHECKING:
    from tests.ranks import RankPool

KINDS = ["ulysses", "allgather", "ring"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_hold_each_position_once(kind: str, size: int) -> None:
    held = torch.cat([ContextParallel(kind, None, rank, size).positions(16) for rank in range(size)])
    assert sorted(held.tolist()) == list(range(16))


@pytest.mark.parametrize("kind", ["allgather", "ring"])
def test_an_early_chunk_comes_with_a_late_one_so_that_ranks_work_alike(kind: str) -> None:
    work = {int((ContextParallel(kind, None, rank, 4).positions(32) + 1).sum()) for rank in range(4)}
    assert len(work) == 1


def whole_group(kind: str) -> ContextParallel:
    return ContextParallel(kind, dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def there_and_back(x: torch.Tensor) -> list[torch.Tensor]:
    """Natural order of all tokens; the sum of three times that on each rank; what the neighbour had."""
    cp = whole_group("ring")
    own = x[cp.positions(x.shape[0])]
    whole = gather_natural(own, cp)
    return [whole, scatter_natural(3 * whole, cp), pass_on_later(own, cp)()]


def test_gathered_tokens_are_in_order_and_sums_go_home(ranks: RankPool) -> None:
    x = torch.randn(16, 2, 3, generator=torch.Generator().manual_seed(0))
    for rank, (whole, home, passed) in enumerate(ranks.run(4, there_and_back, x)):
        assert torch.equal(whole, x)
        torch.testing.assert_close(home, 12 * x[ContextParallel("ring", None, rank, 4).positions(16)])
        assert torch.equal(passed, x[ContextParallel("ring", None, (rank - 1) % 4, 4).positions(16)])


def heads_and_tokens(x: torch.Tensor) -> list[torch.Tensor]:
    cp = whole_group("ulysses")
    own = x[cp.positions(x.shape[0])].requires_grad_()
    heads = to_heads(own, cp)
    back = to_tokens(heads, cp)
    (gradient,) = torch.autograd.grad((back * own.detach()).sum(), own)
    return [heads.detach(), back.detach(), gradient]


def test_ulysses_exchanges_tokens_for_heads_and_back(ranks: RankPool) -> None:
    x = torch.randn(8, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    for rank, (heads, back, gradient) in enumerate(ranks.run(2, heads_and_tokens, x)):
        own = x.chunk(2)[rank]
        assert torch.equal(heads, x.chunk(2, 2)[rank])
        assert torch.equal(back, own)
        assert torch.equal(gradient, own)
