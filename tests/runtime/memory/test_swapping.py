"""A swapped optimizer does what one that stays does, in slices of equal size, and leaves nothing on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from runtime.device_training import CpuDevice
from runtime.memory.swapping import _cut, _Home
from runtime.models.roles import Role
from runtime.optimizers import SWAP_SLICES, Optimizer
from runtime.parallel.trainable import Trainable, Whole

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = ((37, 11), (5,), (200, 3), (1,), (64, 64))


def trainables(*, low: bool, seed: int = 3) -> list[Trainable]:
    draw = torch.Generator().manual_seed(seed)
    found = []
    for number, shape in enumerate(SHAPES):
        weight = torch.randn(shape, generator=draw)
        gradient = torch.randn(shape, generator=draw)
        found.append(
            Trainable(
                name=f"part{number}",
                role=Role(cut=None, partial=False, expert=False, decayed=len(shape) > 1),
                weight=weight,
                low=weight.bfloat16() if low else None,
                gradient=lambda g=gradient: g,  # type: ignore[misc]
                copies=1,
                whole=Whole(shape=shape, mesh=None, placements=()),
            )
        )
    return found


def trained(kind: str, *, swap: bool, low: bool, steps: int = 3) -> tuple[list[Trainable], Optimizer]:
    parts = trainables(low=low)
    optimizer = Optimizer(parts, kind, 0.1, CpuDevice(), swap=swap)
    for _ in range(steps):
        optimizer.step(0.1)
    return parts, optimizer


@pytest.mark.parametrize("low", [True, False], ids=["low precision", "full precision"])
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_the_update_is_the_same(kind: str, *, low: bool) -> None:
    (stay, kept), (go, swapped) = (trained(kind, swap=swap, low=low) for swap in (False, True))
    for a, b in zip(stay, go, strict=True):
        # Vectorised kernels round the elements at the end of a piece in another order.
        torch.testing.assert_close(b.weight, a.weight, rtol=1e-6, atol=1e-7)
        if a.low is not None:
            assert b.low is not None
            torch.testing.assert_close(b.low, a.low, rtol=1e-2, atol=1e-3)
    states, again = kept.state(), swapped.state()
    assert states.keys() == again.keys()
    for name, state in states.items():
        assert state.keys() == again[name].keys()
        for key, value in state.items():
            torch.testing.assert_close(again[name][key].view_as(value), value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_state_that_is_loaded_continues(kind: str) -> None:
    whole, _ = trained(kind, swap=True, low=True, steps=5)
    parts, optimizer = trained(kind, swap=True, low=True, steps=2)
    again = Optimizer(parts, kind, 0.1, CpuDevice(), swap=True)
    again.load(optimizer.state())
    for _ in range(3):
        again.step(0.1)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a.weight, b.weight)


@pytest.mark.parametrize("slices", [1, 3, 16])
def test_slices_are_equal_and_hold_every_element_once(slices: int) -> None:
    homes = [_Home(trainable) for trainable in trainables(low=True)]
    cut = _cut(homes, slices)
    total = sum(home.trainable.weight.numel() for home in homes)
    sizes = [sum(piece.stop - piece.start for piece in pieces) for pieces in cut]
    assert sum(sizes) == total
    assert max(sizes) == -(-total // slices)
    assert len(cut) <= slices
    seen: list[Tensor] = [torch.zeros(shape) for shape in SHAPES]
    for piece in (piece for pieces in cut for piece in pieces):
        piece.of(seen[homes.index(piece.home)]).add_(1)
    assert all(torch.equal(each, torch.ones_like(each)) for each in seen)


def test_a_part_without_a_gradient_waits() -> None:
    parts = trainables(low=False)
    still = Trainable(
        name="still",
        role=Role(cut=None, partial=False, expert=False, decayed=True),
        weight=torch.ones(9, 9),
        gradient=lambda: None,
        copies=1,
        whole=Whole(shape=(9, 9), mesh=None, placements=()),
    )
    optimizer = Optimizer([*parts, still], "adamw", 0.1, CpuDevice(), swap=True)
    optimizer.step(0.1)
    assert torch.equal(still.weight, torch.ones(9, 9))
    assert "still" not in optimizer.state()
    assert SWAP_SLICES == 16
