"""After a step together all ranks go on, or all have the same error."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from cost_models.errors import TitanPlanError
from runtime.checkpoint_ranks import Ranks

if TYPE_CHECKING:
    from tests.ranks import RankPool

ERRORS = {
    "ours": TitanPlanError("R756", "what", "hint", exit_code=1),
    "disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/there"),
    "other": ValueError("a value"),
}


def play(kind: str, bad: int) -> tuple[object, ...]:
    ranks = Ranks(alone=not dist.is_initialized())

    def fail_on(rank: int) -> int:
        if ranks.rank == rank:
            raise ERRORS[kind]
        return ranks.rank

    fine = ranks.collect(lambda: ranks.rank * 10, lambda found: [sum(found) + rank for rank in range(ranks.size)])
    told = ranks.first(lambda: f"rank {ranks.rank} says")
    with pytest.raises((TitanPlanError, OSError, RuntimeError)) as caught:
        ranks.collect(lambda: fail_on(bad), lambda _: [None] * ranks.size)
    with pytest.raises((TitanPlanError, OSError, RuntimeError)) as of_digest:
        ranks.first(lambda: fail_on(0))
    assert str(of_digest.value)
    error = caught.value
    return (
        fine,
        told,
        type(error).__name__,
        str(error),
        getattr(error, "errno", None),
        getattr(error, "exit_code", None),
    )


def test_all_ranks_have_the_answer_or_the_error_of_the_one_that_failed(ranks: RankPool) -> None:
    for kind, expected in {
        "ours": ("TitanPlanError", "error[R756]: what", None, 1),
        "disk": ("OSError", "[Errno 28] No space left on device: '/there'", errno.ENOSPC, None),
        "other": ("RuntimeError", "a value (ValueError on rank 1)", None, None),
    }.items():
        found = ranks.run(2, play, kind, 1)
        assert found == [(10 + rank, "rank 0 says", *expected) for rank in range(2)]


@pytest.mark.parametrize("kind", ERRORS)
def test_one_process_needs_no_group(kind: str) -> None:
    assert play(kind, 0)[:2] == (0, "rank 0 says")
