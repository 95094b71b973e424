"""Activations that wait for backward in host memory, copied while the device computes.

Two layers are on the device at a time: the one in use and the one on its way (forward: out, backward: in).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .host import to_device, to_host

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.device import TrainDevice

SMALLEST_BYTES = 64 * 1024
"""Smaller tensors (statistics, token numbers) cost more to move than to keep."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Moved:
    """One tensor on the host, and on the device while it is on its way in."""

    host: Tensor
    visit: _Visit
    uses: int = 0
    device: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What one operator keeps of it; others may keep the same memory in another shape."""

    moved: _Moved
    shape: torch.Size


@dataclass(slots=True, eq=False)
class _Visit:
    """One forward of one layer: what it left, and the visit before it, which backward needs next.

    Autograd owns what was moved; owned here too, it would be a circle that holds host memory until it is collected.
    """

    before: _Visit | None
    moved: list[weakref.ref[_Moved]] = field(default_factory=list)


class HostStore:
    """The offloaded activations of all model chunks of a rank.

    Args:
        device: gives streams and pinned memory; on a CPU everything is a plain copy.
        smallest_bytes: smaller tensors stay.
    """

    def __init__(self, device: TrainDevice, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self._device, self._smallest = device, smallest_bytes
        self._out, self._in = device.new_stream(), device.new_stream()
        self._visit = _Visit(None)
        # A tensor must live until its copy has left; those of the layer before last have by now.
        self._leaving: tuple[list[Tensor], list[Tensor]] = ([], [])
        # Of this visit, by memory; `_leaving` keeps that alive, so that no other tensor can have it.
        self._put: dict[tuple[int, int, int, torch.dtype], weakref.ref[_Moved]] = {}

    def begin_layer(self, *, first: bool) -> None:
        """Forward enters a layer; the `first` of a chunk has nothing before it that backward would want early."""
        if self._leaving[0]:
            self._device.wait_stream(self._device.current_stream(), self._out)
        self._leaving = (self._leaving[1], [])
        self._visit = _Visit(None if first else self._visit)
        self._put = {}

    def put(self, x: Tensor) -> object:
        """Start the copy to the host, unless one of the same memory went; small tensors and weights stay."""
        if x.numel() * x.element_size() < self._smallest or (x.is_leaf and x.requires_grad):
            return x
        memory = x.untyped_storage()._cdata, int(x.storage_offset()), x.numel(), x.dtype
        known = self._put.get(memory) if x.is_contiguous() else None
        moved = known() if known is not None else None
        if moved is None:
            moved = self._start(x.detach())
            if x.is_contiguous():
                self._put[memory] = weakref.ref(moved)
        moved.uses += 1
        return _Kept(moved, x.shape)

    def _start(self, x: Tensor) -> _Moved:
        self._device.wait_stream(self._out, self._device.current_stream())
        with self._device.stream_context(self._out):
            moved = _Moved(to_host(x, self._device), self._visit)
        self._leaving[1].append(x)
        self._visit.moved.append(weakref.ref(moved))
        return moved

    def get(self, kept: object) -> Tensor:
        """The tensor on the device; what the layer before left starts on its way."""
        assert isinstance(kept, _Kept)  # noqa: S101 - `put` made it
        moved = kept.moved
        self._leaving, self._put = ([], []), {}
        self._fetch(moved)
        self._device.wait_stream(self._device.current_stream(), self._in)
        found = moved.device
        assert found is not None  # noqa: S101 - just fetched
        moved.uses -= 1
        if not moved.uses:
            moved.device = None
        before = moved.visit.before
        if before is not None:
            for other in before.moved:
                if (early := other()) is not None:
                    self._fetch(early)
            before.moved = []
        return found.view(kept.shape)

    def _fetch(self, moved: _Moved) -> None:
        if moved.device is not None:
            return
        # What comes in may take the memory of a tensor that the layer before is still computing with.
        self._device.wait_stream(self._in, self._device.current_stream())
        self._device.wait_stream(self._in, self._out)
        with self._device.stream_context(self._in):
            moved.device = to_device(moved.host, self._device)
