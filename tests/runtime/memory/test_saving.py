"""What is kept for backward: less under selective recomputation, on the host under offload, with the same gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

import runtime.assembly
import runtime.memory.saving
from runtime.assembly import assemble
from runtime.device import open_device
from runtime.memory.offload import HostStore
from tests.runtime.parity.cases import sections_of
from tests.runtime.parity.models import MODELS
from tests.runtime.parity.training import config_of

if TYPE_CHECKING:
    from runtime.config_values import TrainConfig

TOKENS, HIDDEN, WIDE = 64, 128, 256


@dataclass(slots=True)
class Kept:
    """Memory that autograd holds after a forward, each storage once, weights left out."""

    weights: set[int]
    storages: dict[int, int] = field(default_factory=dict)

    def note(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.storages[storage.data_ptr()] = storage.nbytes()

    @property
    def n_bytes(self) -> int:
        return sum(self.storages.values())


def forward_and_backward(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[torch.Tensor]]:
    """Bytes kept over one forward, and all gradients."""
    assembly = assemble(config, open_device("cpu", 0))
    (chunk,) = assembly.chunks
    kept = Kept({p.untyped_storage().data_ptr() for p in chunk.module.parameters()})
    alive: list[object] = []
    stock = torch.autograd.graph.saved_tensors_hooks

    def watched(pack: Any, unpack: Any) -> Any:  # noqa: ANN401
        def noted(x: torch.Tensor) -> object:
            found = pack(x)
            alive.append(found)  # so that no storage is given to another tensor while we count
            if isinstance(found, torch.Tensor):
                kept.note(found)
            return found

        return stock(noted, unpack)

    monkeypatch.setattr(runtime.memory.saving.torch.autograd.graph, "saved_tensors_hooks", watched)
    assembly.scale.token = 1 / TOKENS
    tokens = (torch.arange(TOKENS) * 37 % 512)[None]
    chunk.data.begin_step()
    with watched(lambda x: x, lambda x: x):
        loss = chunk.module(tokens, tokens.roll(1, 1))
    chunk.data.before_backward(last=True)
    loss.backward()
    chunk.data.finish()
    return kept.n_bytes, [g.clone() for t in assembly.trainables if (g := t.gradient()) is not None]


def outcome(model: str, monkeypatch: pytest.MonkeyPatch, **keys: object) -> tuple[int, list[torch.Tensor]]:
    return forward_and_backward(config_of(MODELS[model], sections_of(keys)), monkeypatch)


def test_selective_recomputation_drops_norms_and_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of 4 layers the outputs of two norms and of the MLP's activation, in fp32."""
    whole, wanted = outcome("tiny", monkeypatch)
    less, found = outcome("tiny", monkeypatch, recompute="selective")
    assert whole - less == 4 * 4 * TOKENS * (2 * HIDDEN + WIDE)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_full_recomputation_keeps_the_inputs_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    none, wanted = outcome("tiny", monkeypatch)
    full, found = outcome("tiny", monkeypatch, recompute="full")
    some, _ = outcome("tiny", monkeypatch, recompute=3)
    assert full < some < none
    # Inputs of four layers and of the final norm, and what the loss keeps: gradients of its input and of its weight.
    assert full <= 4 * (6 * TOKENS * HIDDEN + 512 * HIDDEN + 4 * TOKENS) + 8 * TOKENS
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("recompute", [False, "selective", "full"])
@pytest.mark.parametrize("model", ["tiny", "gpt2", "tiny-moe", "mla-q", "qk-norm"])
def test_offload_moves_everything_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, model: str, recompute: object
) -> None:
    kept, wanted = outcome(model, monkeypatch, recompute=recompute)
    monkeypatch.setattr(runtime.assembly, "HostStore", lambda device: HostStore(device, smallest_bytes=0))
    left, found = outcome(model, monkeypatch, recompute=recompute, offload=True)
    assert left < kept
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_small_tensors_and_weights_stay() -> None:
    store = HostStore(open_device("cpu", 0), smallest_bytes=64)
    store.begin_layer(first=True)
    small, weight, large = torch.zeros(15), torch.zeros(100, requires_grad=True), torch.arange(100.0)
    assert store.put(small) is small
    assert store.put(weight) is weight
    moved = store.put(large)
    assert not isinstance(moved, torch.Tensor)
    wanted = large.clone()
    large.zero_()  # the host has a copy of its own
    assert torch.equal(store.get(moved), wanted)


def test_a_layer_brings_the_one_before_it_on_its_way() -> None:
    store = HostStore(open_device("cpu", 0), smallest_bytes=0)
    store.begin_layer(first=True)
    early: Any = store.put(torch.ones(4))
    store.begin_layer(first=False)
    late = store.put(torch.full((4,), 2.0))
    assert early.moved.device is None
    store.get(late)
    assert early.moved.device is not None
    assert torch.equal(store.get(early), torch.ones(4))


def test_micro_batches_do_not_follow_one_another() -> None:
    """Two forwards before a backward: the second's first layer has nothing before it."""
    store = HostStore(open_device("cpu", 0), smallest_bytes=0)
    store.begin_layer(first=True)
    other: Any = store.put(torch.ones(4))
    store.begin_layer(first=True)
    store.get(store.put(torch.ones(4)))
    assert other.moved.device is None


def test_one_memory_goes_once_however_many_operators_keep_it() -> None:
    store = HostStore(open_device("cpu", 0), smallest_bytes=0)
    store.begin_layer(first=True)
    whole = torch.arange(12.0)
    flat, square = store.put(whole), store.put(whole.view(3, 4))
    part: Any = store.put(whole[:4])
    turned: Any = store.put(whole.view(3, 4).t())
    first: Any = flat
    assert first.moved is square.moved  # type: ignore[attr-defined]
    assert part.moved is not first.moved
    assert turned.moved is not first.moved
    assert torch.equal(store.get(square), whole.view(3, 4))
    assert torch.equal(store.get(flat), whole)
    assert first.moved.device is None
    assert torch.equal(store.get(part), whole[:4])
    assert torch.equal(store.get(turned), whole.view(3, 4).t())


def test_memory_of_another_layer_is_not_taken_for_this_ones() -> None:
    store = HostStore(open_device("cpu", 0), smallest_bytes=0)
    x = torch.ones(4)
    store.begin_layer(first=True)
    before: Any = store.put(x)
    store.begin_layer(first=False)
    after: Any = store.put(x.mul_(2))
    assert before.moved is not after.moved
    assert torch.equal(store.get(after), torch.full((4,), 2.0))
    assert torch.equal(store.get(before), torch.ones(4))
