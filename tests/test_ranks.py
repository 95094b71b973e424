"""The pool of ranks: results by rank, failures told with their tracebacks, and a pool that works on afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.ranks import RankError

if TYPE_CHECKING:
    from tests.ranks import RankPool

_ROOT = Path(__file__).parents[1]


def summed(value: int) -> tuple[int, int]:
    """(process, sum of value x rank over the ranks)."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(value * dist.get_rank())
    dist.all_reduce(total)
    return os.getpid(), int(total)


def failing(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError("a fault of one rank")
    dist.barrier()


def failing_everywhere() -> None:
    import torch.distributed as dist

    dist.barrier()  # else who fails first closes its connections to those who still connect
    raise ValueError("a fault of all ranks")


def hanging(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        time.sleep(60)
    dist.barrier()


def dying(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def process() -> int:
    return os.getpid()


def test_ranks_communicate_case_after_case_in_the_same_processes(ranks: RankPool) -> None:
    first, second = ranks.run(2, summed, 5), ranks.run(2, summed, 7)
    assert [total for _, total in first + second] == [5, 5, 7, 7]
    assert {pid for pid, _ in first} == {pid for pid, _ in second}


def test_a_fault_of_all_ranks_is_told_and_others_take_their_place(ranks: RankPool) -> None:
    before = {pid for pid, _ in ranks.run(2, summed, 1)}
    with pytest.raises(RankError, match=r"rank 0 of 2\n.*(?s:.)*rank 1 of 2\n(?s:.)*a fault of all ranks"):
        ranks.run(2, failing_everywhere)
    assert before.isdisjoint(pid for pid, _ in ranks.run(2, summed, 1))


def test_a_fault_of_one_rank_is_told_and_the_others_do_not_wait(ranks: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2\n(?s:.)*in failing\n(?s:.)*a fault of one rank"):
        ranks.run(2, failing, 1)
    assert time.monotonic() - start < 20
    assert [total for _, total in ranks.run(2, summed, 3)] == [3, 3]


def test_a_hang_is_told_with_where_the_ranks_stood(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"no answer within 1 s(?s:.)*in hanging") as caught:
        ranks.run(2, hanging, 1, timeout_s=1)
    assert "rank 0 of 2" in str(caught.value)
    assert "rank 1 of 2" in str(caught.value)
    assert [total for _, total in ranks.run(2, summed, 3)] == [3, 3]


def test_a_death_is_told(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2\nDied"):
        ranks.run(2, dying, 1)
    assert [total for _, total in ranks.run(2, summed, 3)] == [3, 3]


def test_a_killed_session_leaves_no_rank_behind() -> None:
    script = (
        "from tests.ranks import RankPool; from tests import test_ranks as t; import time; pool = RankPool(); "
        "print(*(pid for pid, _ in pool.run(2, t.summed, 1)), pool._template.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=_ROOT, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        pids = [int(word) for word in session.stdout.readline().split()]
        assert len(pids) == 3
        session.kill()
    end = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
