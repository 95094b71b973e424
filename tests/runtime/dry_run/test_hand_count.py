"""Two peaks counted by hand, tensor by tensor."""

from __future__ import annotations

import pytest

from runtime.config import parse_config
from runtime.dry_run import dry_run

TOKENS, HIDDEN, FFN, HEADS, VOCABULARY = 256, 64, 128, 4, 4096
MODEL = {
    "name": "hand",
    "hidden_dim": HIDDEN,
    "n_layers": 1,
    "n_heads": HEADS,
    "n_kv_heads": HEADS,
    "ffn_dim": FFN,
    "vocab_size": VOCABULARY,
}
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN
PARAMETERS = 2 * VOCABULARY * HIDDEN + LAYER + HIDDEN


def kept_for_backward(width: int) -> int:
    """What one layer and the final norm keep, bytes; statistics and the log of the softmax in full precision."""
    hidden, wide = TOKENS * HIDDEN * width, TOKENS * FFN * width
    attention = 2 * hidden + 3 * hidden + hidden + TOKENS * 4 + HEADS * TOKENS * 4  # norm in and out; q, k, v; out
    mlp = 2 * hidden + TOKENS * 4 + 3 * wide  # norm in and out; gate, up and their product
    return attention + mlp + hidden + TOKENS * 4  # the final norm's input


def loss(width: int) -> int:
    """The final norm's output, the gradients that the loss makes for it and for the head's weight, and the logits.

    Logits become full precision by a copy; the low-precision ones end after it, and their gradients begin.
    """
    logits = TOKENS * VOCABULARY * (4 if width == 4 else 4 + width)
    return 2 * TOKENS * HIDDEN * width + VOCABULARY * HIDDEN * width + logits


def test_one_rank_in_full_precision_at_the_loss() -> None:
    values = {"model": MODEL, "training": {"seq_len": TOKENS}, "optimization": {"precision": "fp32"}}
    found = dry_run(parse_config(values, "hand"))
    lasting = PARAMETERS * (4 + 8)  # weights; two moments. Gradients are made in backward, after this moment.
    assert found.moment == "forward of micro batch 1, head"
    assert found.peak_bytes == pytest.approx(lasting + kept_for_backward(4) + loss(4), rel=0.01)
    assert found.memory_bytes["weights"] == PARAMETERS * 4
    assert found.memory_bytes["optimizer"] == pytest.approx(PARAMETERS * 8, abs=1024)  # and a step count a tensor
    # What the loss makes for the head's weight becomes that weight's gradient.
    assert found.memory_bytes["gradients"] == VOCABULARY * HIDDEN * 4
    assert found.parameter_bytes == found.gradient_bytes == PARAMETERS * 4


def test_two_data_parallel_ranks_in_bf16_at_the_loss() -> None:
    values = {
        "model": MODEL,
        "training": {"seq_len": TOKENS, "batch_size": 2, "micro_batch_size": 1},
        "distributed": {"dp_size": 2},
        "optimization": {"precision": "bf16", "zero_stage": 0},
    }
    found = dry_run(parse_config(values, "hand"), rank=1)
    lasting = PARAMETERS * (2 + 4 + 4 + 8)  # bf16 weights, main weights, gradient buckets, two moments
    assert found.moment == "forward of micro batch 1, head"
    assert found.peak_bytes == pytest.approx(lasting + kept_for_backward(2) + loss(2), rel=0.01)
    assert found.memory_bytes["weights"] == PARAMETERS * 2
    assert found.memory_bytes["main_weights"] == found.memory_bytes["gradients"] == PARAMETERS * 4
    kept = kept_for_backward(2) + 2 * VOCABULARY * HIDDEN + 2 * TOKENS * HIDDEN
    assert found.memory_bytes["activations"] == pytest.approx(kept, rel=0.01)
