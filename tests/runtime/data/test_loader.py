"""DataLoader: any split of a global batch covers the same sequences; the thread changes nothing."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.errors import TitanPlanError
from runtime.data import DataLoader, TokenSequences

ROWS = TokenSequences(tokens=np.arange(1001, dtype=np.uint16), seq_len=10, vocab_size=1001, seed=5)


def loader(dp_rank: int, dp: int, micro: int, accumulation: int) -> DataLoader:
    return DataLoader(
        ROWS,
        global_batch=dp * micro * accumulation,
        micro_batch=micro,
        accumulation=accumulation,
        dp_rank=dp_rank,
        dp=dp,
    )


@settings(deadline=None, max_examples=30)
@given(position=st.integers(0, 500), dp=st.integers(1, 4), micro=st.integers(1, 3), accumulation=st.integers(1, 3))
def test_ranks_together_cover_the_global_batch_once(position: int, dp: int, micro: int, accumulation: int) -> None:
    starts: list[int] = []
    for rank in range(dp):
        with loader(rank, dp, micro, accumulation) as batches:
            batch = batches.batch(position)
        assert batch.shape == (accumulation, micro, 11)
        starts += batch[:, :, 0].flatten().tolist()
    expected = [int(ROWS(position + k)[0]) for k in range(dp * micro * accumulation)]
    assert sorted(starts) == sorted(expected)


def test_a_row_is_where_the_formula_says() -> None:
    with loader(1, 2, 3, 2) as batches:
        batch = batches.batch(40)
    for a in range(2):
        for b in range(3):
            assert batch[a, b].tolist() == ROWS(40 + (a * 2 + 1) * 3 + b).tolist()


def test_reading_ahead_gives_what_reading_gives() -> None:
    with loader(0, 2, 2, 1) as ahead:
        for position in (0, 4, 8, 4, 100, 104):
            direct = loader(0, 2, 2, 1)
            assert ahead.batch(position).equal(direct.batch(position))
            direct.close()


def test_the_next_batch_is_read_by_the_thread() -> None:
    readers: list[tuple[int, bool]] = []

    class Spy(TokenSequences):
        def __call__(self, index: int) -> np.ndarray:  # type: ignore[type-arg]
            readers.append((index, threading.current_thread() is threading.main_thread()))
            return self.sequence(index)

    spy = Spy(tokens=ROWS.tokens, seq_len=10, vocab_size=1001, seed=5)
    with DataLoader(spy, global_batch=1, micro_batch=1, accumulation=1, dp_rank=0, dp=1) as batches:
        batches.batch(0)
        batches.batch(1)
    assert readers[:2] == [(0, True), (1, False)]


def test_an_error_in_the_thread_reaches_the_caller_and_reading_again_works() -> None:
    tokens = np.zeros(33, dtype=np.uint16)
    failed: list[int] = []

    class Failing(TokenSequences):
        def __call__(self, index: int) -> np.ndarray:  # type: ignore[type-arg]
            if index == 1 and not failed:
                failed.append(index)
                raise TitanPlanError("R741", "damaged")
            return self.sequence(index)

    rows = Failing(tokens=tokens, seq_len=16, vocab_size=1001, seed=0)
    with DataLoader(rows, global_batch=1, micro_batch=1, accumulation=1, dp_rank=0, dp=1) as batches:
        batches.batch(0)
        with pytest.raises(TitanPlanError, match="R741"):
            batches.batch(1)
        assert batches.batch(1).shape == (1, 1, 17)


def test_a_closed_loader_has_no_thread_and_still_reads() -> None:
    before = threading.active_count()
    batches = loader(0, 1, 1, 1)
    batches.batch(0)
    assert threading.active_count() == before + 1
    batches.close()
    batches.close()
    assert threading.active_count() == before
    assert batches.batch(1).shape == (1, 1, 11)


def test_a_program_that_forgets_to_close_ends_at_once_and_silently() -> None:
    program = (
        "import numpy as np\n"
        "from runtime.data import DataLoader, TokenSequences\n"
        "rows = TokenSequences(tokens=np.arange(99, dtype=np.uint16), seq_len=4, vocab_size=99, seed=0)\n"
        "loader = DataLoader(rows, global_batch=1, micro_batch=1, accumulation=1, dp_rank=0, dp=1)\n"
        "print(tuple(loader.batch(0).shape))\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(1, 1, 5)\n", "")


def test_sizes_that_contradict_each_other_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(TitanPlanError, match=r"B501.*2 x .*3 x dp_size 2 = 12, batch_size is 16"):
        DataLoader(ROWS, global_batch=16, micro_batch=2, accumulation=3, dp_rank=0, dp=2)
    with pytest.raises(ValueError, match="dp_rank 2 of 2"):
        DataLoader(ROWS, global_batch=2, micro_batch=1, accumulation=1, dp_rank=2, dp=2)
