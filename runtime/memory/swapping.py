"""Optimizer state in host memory that passes through the device in slices of equal size.

A slice may begin and end inside a tensor: the update is element by element. Else a slice would be as large as the
largest tensor, which is a table of embeddings or the matrices of all experts. Host memory is taken once: pinning it
costs more than the copy that it is for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .host import to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from runtime.device import TrainDevice
    from runtime.parallel.trainable import Trainable


@dataclass(slots=True, eq=False)
class _Home:
    """One part's state on the host, flat.

    Attributes:
        moments: by name, empty before the first update.
    """

    trainable: Trainable
    moments: dict[str, Tensor] = field(default_factory=dict)

    @property
    def moves(self) -> bool:
        """Whether the weight is on the host too."""
        return self.trainable.low is not None


@dataclass(slots=True, eq=False)
class _Piece:
    """Elements [start, stop) of one part, as the parameter that the optimizer updates.

    Attributes:
        begun: its moments are in the part's; other pieces of a part may be first.
    """

    home: _Home
    start: int
    stop: int
    parameter: nn.Parameter
    begun: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """This piece of a tensor of the part's shape."""
        return whole.reshape(-1)[self.start : self.stop]


@dataclass(slots=True, eq=False)
class _Slice:
    """What passes through the device together."""

    optimizer: torch.optim.Optimizer
    pieces: list[_Piece]


class SwappedState:
    """Slices of all parts, two of them on the device at a time.

    Args:
        make: an optimizer of pieces.
    """

    def __init__(
        self,
        trainables: Iterable[Trainable],
        make: Callable[[Sequence[tuple[Trainable, nn.Parameter]]], torch.optim.Optimizer],
        device: TrainDevice,
        slices: int,
    ) -> None:
        self._device = device
        self._in, self._out = device.new_stream(), device.new_stream()
        self._homes = [_Home(trainable) for trainable in trainables]
        self._slices = []
        for pieces in _cut(self._homes, slices):
            pairs = [(piece.home.trainable, piece.parameter) for piece in pieces]
            self._slices.append(_Slice(make(pairs), pieces))

    def step(
        self, run: Callable[[torch.optim.Optimizer], None], gradient_of: Callable[[Trainable], Tensor | None]
    ) -> None:
        """While one slice is updated the next comes in and the last goes out."""
        self._fetch(self._slices[:1])
        for place, slice_ in enumerate(self._slices):
            self._device.wait_stream(self._device.current_stream(), self._in)
            self._fetch(self._slices[place + 1 : place + 2])
            for piece in slice_.pieces:
                gradient = gradient_of(piece.home.trainable)
                piece.parameter.grad = None if gradient is None else piece.of(gradient)
            run(slice_.optimizer)
            self._send(slice_)
        self._device.wait_stream(self._device.current_stream(), self._out)

    def _fetch(self, slices: list[_Slice]) -> None:
        """Start a slice on its way. What comes in may take the memory of a slice that is still going out."""
        self._device.wait_stream(self._in, self._out)
        with self._device.stream_context(self._in):
            for slice_ in slices:
                for piece in slice_.pieces:
                    self._bring(slice_.optimizer, piece)

    def _bring(self, optimizer: torch.optim.Optimizer, piece: _Piece) -> None:
        home, weight = piece.home, piece.of(piece.home.trainable.weight)
        piece.parameter.data = to_device(weight, self._device) if home.moves else weight
        for name, whole in home.moments.items() if piece.begun else ():
            optimizer.state[piece.parameter][name] = to_device(piece.of(whole), self._device)

    def _send(self, slice_: _Slice) -> None:
        for piece in slice_.pieces:
            low = piece.home.trainable.low
            if low is not None:
                piece.of(low).copy_(piece.parameter.data)
            piece.parameter.grad = None
        self._device.wait_stream(self._out, self._device.current_stream())
        with self._device.stream_context(self._out):
            for piece in slice_.pieces:
                self._take(slice_.optimizer.state.get(piece.parameter, {}), piece)

    def _take(self, state: dict[str, Any], piece: _Piece) -> None:
        """Copy one piece home and leave nothing of it on the device."""
        home, quick = piece.home, self._device.can_pin
        if home.moves:
            weight = piece.of(home.trainable.weight)
            weight.copy_(piece.parameter.data, non_blocking=quick)
            piece.parameter.data = weight
        for name, value in [(n, v) for n, v in state.items() if _moves(v)]:
            if name not in home.moments:
                home.moments[name] = self._device.host_like(home.trainable.weight)
            piece.of(home.moments[name]).copy_(value, non_blocking=quick)
            piece.begun = True
            del state[name]

    def state(self) -> dict[str, dict[str, Tensor]]:
        """As Optimizer.state: moments of whole parts in host memory, and the number of updates."""
        found = {home.trainable.name: dict(home.moments) for home in self._homes if home.moments}
        for slice_ in self._slices:
            for piece in slice_.pieces:
                for name, value in slice_.optimizer.state.get(piece.parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        found.setdefault(piece.home.trainable.name, {})[name] = value
        return found

    def load(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """As Optimizer.load."""
        for home in self._homes:
            for name, value in states.get(home.trainable.name, {}).items():
                if _moves(value):
                    home.moments[name] = value
        for slice_ in self._slices:
            for piece in slice_.pieces:
                given = states.get(piece.home.trainable.name, {})
                numbers = {name: value.clone() for name, value in given.items() if not _moves(value)}
                piece.begun = bool(given)
                if given:
                    slice_.optimizer.state[piece.parameter] = numbers


def _moves(value: object) -> bool:
    """Moments move; the step's count is a number, or a tensor of one."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _cut(homes: Sequence[_Home], slices: int) -> list[list[_Piece]]:
    """Parts in order, cut into slices of equal size."""
    total = sum(home.trainable.weight.numel() for home in homes)
    each = max(-(-total // slices), 1)
    out: list[list[_Piece]] = [[]]
    room = each
    for home in homes:
        at, numel = 0, home.trainable.weight.numel()
        while at < numel:
            stop = min(numel, at + room)
            weight = home.trainable.weight.view(-1)[at:stop]
            parameter = nn.Parameter(weight)
            parameter.data = weight  # nn.Parameter made an alias; the memory must be the very same
            out[-1].append(_Piece(home, at, stop, parameter))
            room -= stop - at
            at = stop
            if not room:
                out.append([])
                room = each
    return [pieces for pieces in out if pieces] or [[]]
