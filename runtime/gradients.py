"""Between backward and the update: sums that data parallelism does not make, the global norm, clipping."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from runtime.parallel.trainable import Trainable

# As torch.nn.utils.clip_grad_norm_ has it.
_CLIP_EPSILON = 1e-6


def sum_partial(trainables: Iterable[Trainable], tp: dist.ProcessGroup | None) -> None:
    """Sum the gradients of which each tp rank holds a part (norms between sharded tokens), in one message."""
    if tp is None:
        return
    parts = [g for t in trainables if t.role.partial and (g := t.gradient()) is not None and g.numel()]
    if not parts:
        return
    flat = torch.cat([g.reshape(-1) for g in parts])
    dist.all_reduce(flat, group=tp)
    for part, total in zip(parts, flat.split([g.numel() for g in parts]), strict=True):
        part.copy_(total.view_as(part))


def squared_norm(trainables: Iterable[Trainable], device: torch.device) -> Tensor:
    """This rank's share of the squared global norm: a sum over the world counts each parameter once."""
    shares: dict[int, list[Tensor]] = {}
    for trainable in trainables:
        gradient = trainable.gradient()
        if gradient is not None and not trainable.borrowed:
            shares.setdefault(trainable.copies, []).append(gradient)
    total = torch.zeros((), device=device, dtype=torch.float32)
    for copies, gradients in shares.items():
        norms = torch._foreach_norm(gradients)
        total += torch.stack(norms).square_().sum() / copies
    return total


def scale_gradients(trainables: Iterable[Trainable], factor: float) -> None:
    """Multiply all gradients in place."""
    gradients = [g for t in trainables if (g := t.gradient()) is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def clip_factor(norm: float, most: float) -> float:
    """What brings gradients of this norm to a norm of at most `most`; 1 where they are there, or for most 0."""
    if not most or not math.isfinite(norm):
        return 1.0
    return min(1.0, most / (norm + _CLIP_EPSILON))
