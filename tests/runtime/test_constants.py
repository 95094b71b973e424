"""What the cost model says of the trainer in numbers is what the trainer does."""

from __future__ import annotations

from cost_models import layer_backward, rank_buckets
from cost_models.rule_checks import _TRAINED_IN
from cost_models.stack import TITAN
from cost_models.stage_states import SWAP_SLICES
from runtime.models import activations
from runtime.models.loss import CHUNK_TOKENS
from runtime.optimizers import SWAP_SLICES as OPTIMIZER_SLICES
from runtime.parallel import replicated
from runtime.parallel.data import DTYPES


def test_the_loss_is_taken_in_chunks_of_the_same_length() -> None:
    assert TITAN.loss_chunk_tokens == CHUNK_TOKENS


def test_a_swapped_optimizer_passes_in_as_many_slices() -> None:
    assert OPTIMIZER_SLICES == SWAP_SLICES


def test_the_trainer_computes_in_the_precisions_that_the_rule_lets_pass() -> None:
    assert set(DTYPES) == _TRAINED_IN


def test_gradients_fill_buckets_of_the_same_size() -> None:
    predicted = (rank_buckets._BUCKET_BYTES, rank_buckets._FIRST_BUCKET_BYTES, rank_buckets._FEWEST_MESSAGES)
    assert predicted == (replicated.BUCKET_BYTES, replicated.FIRST_BUCKET_BYTES, replicated._FEWEST_MESSAGES)


def test_a_row_gradient_is_formed_of_as_many_rows_at_a_time() -> None:
    assert layer_backward._ROWS == activations._ROWS
