"""What a layer keeps for backward: stock operators against ours, and ours under each way of saving.

`python -m benchmarks.live_bytes` prints a table. Bytes are those of the distinct storages that autograd was given to
keep, weights apart; they do not depend on the machine's speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.plain_loop import PlainDecoder, turned
from runtime.assembly import assemble
from runtime.config import parse_config
from runtime.device import open_device
from runtime.memory.saving import Saving
from runtime.models import activations
from runtime.models.attention import AttentionShape, attend
from runtime.models.attention_kernels import CpuKernel
from runtime.models.loss import LossShape, token_loss
from runtime.models.norms import Norm
from runtime.models.rotary import RotaryTable, rotate
from runtime.parallel.context import ContextParallel
from runtime.parallel.tensor import TensorParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from benchmarks.plain_loop import PlainLayer

TOKENS, HIDDEN, HEADS, KV_HEADS, WIDTH, FFN, VOCABULARY = 2048, 1024, 8, 2, 128, 2816, 16384
_DTYPE = torch.bfloat16


def kept_bytes(run: Callable[[], Tensor], weights: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd keeps after a forward, weights left out; each storage counts once."""
    known = {w.untyped_storage().data_ptr() for w in weights}
    seen: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = run()  # held until the count is made: what is freed could be counted twice at one address
    del out
    return sum(seen.values())


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=_DTYPE, requires_grad=True)


def operators() -> list[tuple[str, int, int]]:
    """Name, bytes of the stock way, bytes of ours; one operator each, bf16."""
    x, norm = _random(TOKENS, HIDDEN), Norm(HIDDEN, 1e-5).to(_DTYPE)
    torch.nn.init.ones_(norm.weight)
    rows = [
        (
            "RMSNorm",
            kept_bytes(lambda: F.rms_norm(x, (HIDDEN,), norm.weight), [norm.weight]),
            kept_bytes(lambda: norm(x), [norm.weight]),
        )
    ]
    q = _random(TOKENS, 1, HEADS, WIDTH)
    table = RotaryTable(torch.arange(TOKENS), WIDTH, 1e4)
    cos, sin = table.cos[..., : WIDTH // 2].to(_DTYPE), table.sin.to(_DTYPE)
    rows.append(("rotary", kept_bytes(lambda: turned(q, cos, sin), [cos, sin]), kept_bytes(lambda: rotate(q, table))))
    gate, up = _random(TOKENS, FFN), _random(TOKENS, FFN)
    rows.append(("gated MLP", kept_bytes(lambda: F.silu(gate) * up), kept_bytes(lambda: activations.gated(gate, up))))
    rows.append(("attention, 8 heads on 2 K/V heads", *_attention()))
    rows.append(("logits and loss", *_loss()))
    return rows


def _attention() -> tuple[int, int]:
    q, k, v = _random(TOKENS, 1, HEADS, WIDTH), _random(TOKENS, 1, KV_HEADS, WIDTH), _random(TOKENS, 1, KV_HEADS, WIDTH)
    a, b, c = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    stock = kept_bytes(lambda: F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True))
    shape = AttentionShape(CpuKernel(), ContextParallel())
    return stock, kept_bytes(lambda: attend(q, k, v, shape))


def _loss() -> tuple[int, int]:
    hidden, weight = _random(TOKENS, HIDDEN), torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN, dtype=_DTYPE))
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    stock = kept_bytes(lambda: F.cross_entropy((hidden @ weight.t()).float(), labels), [weight, labels])
    shape = LossShape(TensorParallel(), VOCABULARY, 1.0 / TOKENS)
    return stock, kept_bytes(lambda: token_loss(hidden, weight, labels, shape), [weight, labels])


def layers() -> list[tuple[str, int]]:
    """Bytes that one layer keeps: stock, and ours under each way of recomputing and with offload (on the device)."""
    model = {
        "name": "layer",
        "hidden_dim": HIDDEN,
        "n_layers": 1,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "ffn_dim": FFN,
        "vocab_size": 512,
    }
    found = [("stock operators", _stock_layer(model))]
    ways: list[tuple[str, dict[str, object]]] = [
        ("ours", {}),
        ("ours, selective recomputation", {"gradient_checkpointing": "selective"}),
        ("ours, full recomputation", {"gradient_checkpointing": "full"}),
        ("ours, activations offloaded", {"activation_cpu_offload": True}),
    ]
    return found + [(name, _our_layer(model, options)) for name, options in ways]


def _stock_layer(model: dict[str, object]) -> int:
    config = parse_config({"model": model, "training": {"seq_len": TOKENS}}, "benchmark")
    module = PlainDecoder(config.model, TOKENS).to(_DTYPE)
    layer, x = cast("PlainLayer", module.layers[0]), _random(1, TOKENS, HIDDEN)
    weights = [*module.parameters(), module.cos, module.sin]
    cos, sin = module.cos.to(_DTYPE), module.sin.to(_DTYPE)
    return kept_bytes(lambda: layer(x, cos, sin), [*weights, cos, sin])


def _our_layer(model: dict[str, object], options: dict[str, object]) -> int:
    values = {"model": model, "training": {"seq_len": TOKENS}, "optimization": {"precision": "bf16", **options}}
    config = parse_config(values, "benchmark")
    chunk = assemble(config, open_device("cpu", 0)).chunks[0]
    layer, x = chunk.module.layers["0"], _random(TOKENS, HIDDEN)
    return _kept_by_layer(layer, x, list(chunk.module.parameters()))


def _kept_by_layer(layer: torch.nn.Module, x: Tensor, weights: list[Tensor]) -> int:
    """A layer that saves by hooks of its own is asked through them: what they hand back as a tensor stays here."""
    seen: dict[int, int] = {}
    known = {w.untyped_storage().data_ptr() for w in weights}
    inner = Saving._pack

    def pack(self: Saving, tensor: Tensor) -> object:
        kept = inner(self, tensor)
        if isinstance(kept, torch.Tensor) and kept.untyped_storage().data_ptr() not in known:
            seen[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
        return kept

    with patch.object(Saving, "_pack", pack):
        around = kept_bytes(lambda: layer(x), weights)
    return sum(seen.values()) or around


def main() -> None:
    mib = 2.0**20
    print(f"{TOKENS} tokens, hidden {HIDDEN}, {HEADS} heads on {KV_HEADS} K/V heads, ffn {FFN}, bf16\n")
    print("| kept for backward, MiB | stock | ours |\n|---|--:|--:|")
    for name, stock, ours in operators():
        print(f"| {name} | {stock / mib:.2f} | {ours / mib:.2f} |")
    print("\n| one layer | MiB |\n|---|--:|")
    for name, n_bytes in layers():
        print(f"| {name} | {n_bytes / mib:.2f} |")


if __name__ == "__main__":
    main()
