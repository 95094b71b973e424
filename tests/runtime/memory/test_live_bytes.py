"""What a layer keeps for backward is what the operator table says, byte for byte, and what a hand count says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from cost_models.layout import Layout, Layouts
from cost_models.model import ModelSpec
from cost_models.operators import OperatorTable, Shapes, saved_bytes
from cost_models.stack import TITAN
from cost_models.workload import Workload
from runtime.assembly import assemble
from runtime.config import parse_config
from runtime.device import open_device
from runtime.memory.saving import Saving

TOKENS = 128
DENSE = ModelSpec(
    name="dense",
    hidden_dim=64,
    n_layers=1,
    n_heads=8,
    n_kv_heads=2,
    head_dim=8,
    ffn_dim=160,
    vocab_size=256,
    seq_len=TOKENS,
)
MODELS = {
    "gqa": DENSE,
    "mha": replace(DENSE, n_kv_heads=8),
    "plain": replace(DENSE, gated_mlp=False, norm="layernorm"),
    "qk_norm": replace(DENSE, qk_norm=True, head_dim=16),
}


def kept_bytes(run: Callable[[], Tensor], weights: list[Tensor]) -> int:
    """Bytes of the distinct storages that stay on the device until backward, weights left out."""
    known = {w.untyped_storage().data_ptr() for w in weights}
    seen: dict[int, int] = {}

    def note(kept: object) -> object:
        if isinstance(kept, Tensor) and kept.untyped_storage().data_ptr() not in known:
            seen[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
        return kept

    inner = Saving._pack
    with (
        patch.object(Saving, "_pack", lambda self, x: note(inner(self, x))),
        torch.autograd.graph.saved_tensors_hooks(note, lambda x: x),
    ):
        out = run()
    del out
    return sum(seen.values())


def layer_bytes(model: ModelSpec, precision: str, **options: object) -> int:
    shape = {name: getattr(model, name) for name in ModelSpec.__slots__ if getattr(model, name) is not None}
    values = {
        "model": shape,
        "training": {"seq_len": TOKENS, "micro_batch_size": 2},
        "optimization": {"precision": precision, **options},
    }
    chunk = assemble(parse_config(values, "test"), open_device("cpu", 0)).chunks[0].module
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.randn(2 * TOKENS, model.hidden_dim, dtype=dtype, requires_grad=True)
    return kept_bytes(lambda: chunk.layers["0"](x), list(chunk.parameters()))


def table_bytes(model: ModelSpec, precision: str, redone: frozenset[str]) -> float:
    workload = Workload(seq_len=TOKENS, global_batch=2, precision=precision)
    shapes = Shapes.of(Layouts.of([Layout(micro_batch=2)]), workload)
    operators = OperatorTable(model, workload, TITAN, shapes).dense_layer()
    # PyTorch's CPU kernel keeps LayerNorm's mean and deviation of two norms in the dtype of its input, others in fp32.
    narrow = 2 * 2 * 2 * TOKENS * 2 if model.norm == "layernorm" and precision == "bf16" else 0
    return float(np.asarray(saved_bytes(operators, redone)).item()) - narrow


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_keeps_what_the_operator_table_says(name: str, precision: str) -> None:
    assert layer_bytes(MODELS[name], precision) == table_bytes(MODELS[name], precision, frozenset())


@pytest.mark.parametrize("name", MODELS)
def test_selective_recomputation_keeps_what_the_operator_table_says(name: str) -> None:
    kept = layer_bytes(MODELS[name], "bf16", gradient_checkpointing="selective")
    assert kept == table_bytes(MODELS[name], "bf16", TITAN.selective)


def test_a_hand_count_of_one_layer() -> None:
    tokens, hidden, ffn, kv = 2 * TOKENS, 64, 160, 16
    stream = 2 * tokens * hidden  # layer input, sum after attention
    normed = 2 * tokens * hidden  # what the projections read
    attention = tokens * (hidden + 2 * kv + hidden)  # q, k, v, output
    mlp = 3 * tokens * ffn  # gate, up, activated
    full_precision = tokens * (8 + 2)  # softmax of 8 heads, two norms
    assert layer_bytes(DENSE, "bf16") == 2 * (stream + normed + attention + mlp) + 4 * full_precision
    assert (
        layer_bytes(DENSE, "bf16", gradient_checkpointing="selective")
        == 2 * (stream + attention + mlp - tokens * ffn) + 4 * full_precision
    )
    assert layer_bytes(DENSE, "bf16", gradient_checkpointing="full") == 2 * tokens * hidden


def test_offloaded_activations_leave_only_small_tensors_on_the_device() -> None:
    """Tensors below 64 KiB stay: here all but the three of the MLP, of 80 KiB."""
    tokens, ffn = 2 * TOKENS, 160
    assert layer_bytes(DENSE, "bf16") - layer_bytes(DENSE, "bf16", activation_cpu_offload=True) == 2 * 3 * tokens * ffn
