"""TokenSequences: every token is predicted once an epoch, at any length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.errors import TitanPlanError
from runtime.data import TokenSequences, epochs_to_steps


def sequences(n_tokens: int, seq_len: int, seed: int = 0) -> TokenSequences:
    return TokenSequences(tokens=np.arange(n_tokens, dtype=np.uint16), seq_len=seq_len, vocab_size=n_tokens, seed=seed)


@settings(deadline=None)
@given(n_tokens=st.integers(2, 300), seq_len=st.integers(1, 40), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_an_epoch_predicts_every_token_but_the_first_and_a_rest(
    n_tokens: int, seq_len: int, seed: int, epoch: int
) -> None:
    if n_tokens <= seq_len:
        return
    rows = sequences(n_tokens, seq_len, seed)
    count = rows.n_sequences
    labels = [label for i in range(count) for label in rows(epoch * count + i)[1:]]
    assert sorted(labels) == list(range(1, count * seq_len + 1))
    assert n_tokens - 1 - count * seq_len < seq_len


def test_a_sequence_is_consecutive_tokens_and_a_copy() -> None:
    rows = sequences(100, 9)
    row = rows.sequence(3)
    assert (row.dtype, row.shape) == (np.int64, (10,))
    assert np.diff(row).tolist() == [1] * 9
    row[:] = 0
    assert rows.sequence(3)[-1] != 0


def test_epochs_have_other_orders() -> None:
    rows = sequences(1000, 9)
    starts = [int(rows(index)[0]) for index in range(2 * rows.n_sequences)]
    first, second = starts[: rows.n_sequences], starts[rows.n_sequences :]
    assert first != second
    assert sorted(first) == sorted(second)


def test_too_few_tokens_for_one_sequence_is_an_error_with_both_numbers() -> None:
    with pytest.raises(TitanPlanError) as caught:
        sequences(16, 16)
    assert caught.value.code == "C621"
    assert "16 tokens" in caught.value.message
    assert "16 + 1 = 17" in caught.value.message
    assert "seq_len" in caught.value.hint
    assert sequences(17, 16).n_sequences == 1


def test_a_token_that_the_model_lacks_is_not_handed_on() -> None:
    rows = TokenSequences(tokens=np.array([1, 2, 600], np.uint16), seq_len=2, vocab_size=512, seed=0)
    with pytest.raises(TitanPlanError, match=r"R741.*600.*512"):
        rows(0)


@pytest.mark.parametrize(("epochs", "n", "batch", "steps"), [(3, 100, 8, 37), (1, 7, 8, 1), (2, 8, 8, 2)])
def test_steps_of_epochs(epochs: int, n: int, batch: int, steps: int) -> None:
    assert epochs_to_steps(epochs, n, batch) == steps
