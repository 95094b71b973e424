"""The optimizer on this rank's parts, whole or in slices that pass through the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.memory.swapping import SwappedState
from runtime.parallel.trainable import own_gradient, publish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

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
"""As cost_models.stage_states, after MindSpeed's swap-optimizer-times."""


class Optimizer:
    """AdamW, Adam or SGD with momentum over `trainables`.

    Args:
        kind: `adamw`, `adam` or `sgd`.
        swap: state lives on the host; slice by slice it comes, is used and goes, two slices on the device at a time.
    """

    def __init__(
        self, trainables: Iterable[Trainable], kind: str, lr: float, device: TrainDevice, *, swap: bool
    ) -> None:
        own = [t for t in trainables if t.weight.numel()]
        self._swapped = SwappedState(own, lambda pairs: _made(kind, pairs, lr), device, SWAP_SLICES) if swap else None
        self._parts = [] if swap else [(t, nn.Parameter(t.weight)) for t in own]
        for trainable, part in self._parts:
            part.data = trainable.weight  # nn.Parameter made an alias; the memory must be the very same
        self._optimizer = _made(kind, self._parts, lr)

    def step(self, lr: float, gradient: Callable[[Trainable], Tensor | None] = own_gradient) -> None:
        """Update all weights with their gradients, or with what else stands for these."""
        if self._swapped is not None:
            self._swapped.step(lambda optimizer: _run(optimizer, lr), gradient)
            return
        for trainable, part in self._parts:
            part.grad = gradient(trainable)
        _run(self._optimizer, lr)
        publish(t for t, _ in self._parts)
        for _, part in self._parts:
            part.grad = None

    def state(self) -> dict[str, dict[str, Tensor]]:
        """State tensors of each parameter's part by name, where they live; empty before the first step."""
        if self._swapped is not None:
            return self._swapped.state()
        found: dict[str, dict[str, Tensor]] = {}
        for trainable, part in self._parts:
            values = self._optimizer.state.get(part, {})
            if values:
                found[trainable.name] = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
        return found

    def load(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace the state; a part without an entry starts afresh."""
        if self._swapped is not None:
            self._swapped.load(states)
        for trainable, part in self._parts:
            given = states.get(trainable.name)
            if given:
                self._optimizer.state[part] = dict(given)


def _made(kind: str, pairs: Sequence[tuple[Trainable, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
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
