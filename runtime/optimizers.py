"""The optimizer on this rank's parts, in slices, so that its state can live on the host and pass through the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from runtime.memory.host import to_device, to_host
from runtime.parallel.trainable import publish

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from runtime.device import TrainDevice
    from runtime.parallel.trainable import Trainable

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
"""Those of Llama 2 (arXiv:2307.09288, section 2.2) and of torchtitan."""
EPSILON = 1e-8
"""torch's and torchtitan's default."""
MOMENTUM = 0.9
"""Of SGD, as usual (Sutskever et al. 2013, section 3)."""
SWAP_SLICES = 16
"""As cost_models.stage_memory, after MindSpeed's swap-optimizer-times."""


class Optimizer:
    """AdamW, Adam or SGD with momentum over `trainables`.

    Args:
        kind: `adamw`, `adam` or `sgd`.
        swap: state lives on the host; slice by slice it comes, is used and goes, two slices on the device at a time.
    """

    def __init__(
        self, trainables: Iterable[Trainable], kind: str, lr: float, device: TrainDevice, *, swap: bool
    ) -> None:
        self._parts = [(t, nn.Parameter(t.weight)) for t in trainables if t.weight.numel()]
        for trainable, part in self._parts:
            part.data = trainable.weight  # nn.Parameter made an alias; the memory must be the very same
        slices = _sliced(self._parts, SWAP_SLICES if swap else 1)
        self._slices = [_made(kind, slice_, lr) for slice_ in slices]
        self._host = _HostState(device, self._parts) if swap else None
        self.names = {id(part): t.name for t, part in self._parts}

    def step(self, lr: float) -> None:
        """Update all weights with their gradients."""
        for trainable, part in self._parts:
            part.grad = trainable.gradient()
        if self._host is not None:
            self._host.step(self._slices, lr)
        else:
            for optimizer in self._slices:
                _run(optimizer, lr)
            publish(t for t, _ in self._parts)
        for _, part in self._parts:
            part.grad = None

    def state(self) -> dict[str, dict[str, Tensor]]:
        """State tensors of each parameter's part by name, where they live; empty before the first step."""
        found: dict[str, dict[str, Tensor]] = {}
        for optimizer in self._slices:
            for part, values in optimizer.state.items():
                found[self.names[id(part)]] = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
        return found

    def load(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace the state; a part without an entry starts afresh."""
        for optimizer in self._slices:
            for group in optimizer.param_groups:
                for part in group["params"]:
                    given = states.get(self.names[id(part)])
                    if given:
                        optimizer.state[part] = dict(given)
        if self._host is not None:
            self._host.adopt(self._slices)


def _sliced(parts: list[Any], slices: int) -> list[list[Any]]:
    """Parts in order, cut into slices of about equal bytes."""
    total = sum(part.numel() for _, part in parts)
    out: list[list[Any]] = [[] for _ in range(slices)]
    before = 0
    for pair in parts:
        out[min(before * slices // max(total, 1), slices - 1)].append(pair)
        before += pair[1].numel()
    return [slice_ for slice_ in out if slice_] or [[]]


def _made(kind: str, pairs: list[tuple[Trainable, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for t, p in pairs if t.role.decayed], "weight_decay": WEIGHT_DECAY},
        {"params": [p for t, p in pairs if not t.role.decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]] or [{"params": [nn.Parameter(torch.zeros(0))]}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=MOMENTUM)
    if kind == "adam":
        return torch.optim.Adam(groups, lr=lr, betas=BETAS, eps=EPSILON, fused=True)
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPSILON, fused=True)


def _run(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


class _Arrived(NamedTuple):
    """What of one part came to the device: its weight, if it lives on the host, and its moments."""

    weight: Tensor | None
    moments: dict[str, Any]


class _HostState:
    """Moves slices between host and device: moments, and full-precision weights that have a copy in low precision."""

    def __init__(self, device: TrainDevice, swapped: list[tuple[Trainable, nn.Parameter]]) -> None:
        self._device = device
        self._lows = {id(part): t.low for t, part in swapped if t.low is not None}
        self._homes = {id(part): t.weight for t, part in swapped if t.low is not None}
        self._in, self._out = device.new_stream(), device.new_stream()

    def step(self, slices: list[torch.optim.Optimizer], lr: float) -> None:
        """While one slice is updated the next comes in and the last goes out."""
        arriving = self._fetch(slices[0])
        for place, optimizer in enumerate(slices):
            self._device.wait_stream(self._device.current_stream(), self._in)
            _adopt(optimizer, arriving)
            arriving = self._fetch(slices[place + 1]) if place + 1 < len(slices) else {}
            _run(optimizer, lr)
            self._send(optimizer)
        self._device.wait_stream(self._device.current_stream(), self._out)

    def adopt(self, slices: list[torch.optim.Optimizer]) -> None:
        """State that was loaded goes to the host."""
        for optimizer in slices:
            self._send_moments(optimizer)
        self._device.wait_stream(self._device.current_stream(), self._out)

    def _fetch(self, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, _Arrived]:
        """Start a slice on its way. What comes in may take the memory of a slice that is still going out."""
        self._device.wait_stream(self._in, self._out)
        with self._device.stream_context(self._in):
            return {part: self._arrived(part, optimizer.state.get(part, {})) for part in _parts(optimizer)}

    def _arrived(self, part: nn.Parameter, state: Mapping[str, Any]) -> _Arrived:
        moments = {key: to_device(value, self._device) if _moves(value) else value for key, value in state.items()}
        return _Arrived(to_device(part.data, self._device) if id(part) in self._lows else None, moments)

    def _send(self, optimizer: torch.optim.Optimizer) -> None:
        for part in _parts(optimizer):
            if id(part) in self._lows:
                self._lows[id(part)].copy_(part.data)
        self._send_moments(optimizer)
        with self._device.stream_context(self._out):
            for part in _parts(optimizer):
                if id(part) in self._lows:
                    self._homes[id(part)].copy_(part.data, non_blocking=self._device.can_pin)
                    part.data = self._homes[id(part)]

    def _send_moments(self, optimizer: torch.optim.Optimizer) -> None:
        self._device.wait_stream(self._out, self._device.current_stream())
        with self._device.stream_context(self._out):
            for state in optimizer.state.values():
                for key, value in state.items():
                    if _moves(value):
                        state[key] = to_host(value, self._device)


def _moves(value: object) -> bool:
    """Moments move; the step's count is a number, or a tensor of one."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _parts(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [part for group in optimizer.param_groups for part in group["params"]]


def _adopt(optimizer: torch.optim.Optimizer, arriving: Mapping[nn.Parameter, _Arrived]) -> None:
    for part, arrived in arriving.items():
        if arrived.weight is not None:
            part.data = arrived.weight
        if arrived.moments:
            optimizer.state[part] = arrived.moments
