"""Trainable: the part of one parameter that this rank updates, whoever shards it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from runtime.models.roles import Role


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Whole:
    """Where this rank's part lies in the whole parameter, in DTensor's words.

    Attributes:
        shape: of the whole parameter.
        mesh: the ranks that hold it; None where this process holds it alone.
    """

    shape: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]


Swapping = Callable[["Tensor"], "Tensor"]
"""Moves full-precision weights to the host, where they wait for the update."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trainable:
    """One parameter's part.

    Attributes:
        name: of the parameter in the whole model.
        weight: full precision; the optimizer updates it in place. On the host where it is swapped out.
        low: the copy in low precision that the model computes with, on the device; None where that is the weight.
        gradient: full precision, reduced over the ranks that hold copies; None before the first backward.
        copies: ranks of the world that hold this very part; a sum over the world counts it so often.
        borrowed: a copy that another stage owns (the head of a tied embedding); it is updated but not counted or saved.
    """

    name: str
    role: Role
    weight: Tensor
    gradient: Callable[[], Tensor | None]
    copies: int
    whole: Whole
    low: Tensor | None = None
    borrowed: bool = False


def own_gradient(trainable: Trainable) -> Tensor | None:
    """The gradient that backward made of it."""
    return trainable.gradient()


def publish(trainables: Iterable[Trainable]) -> None:
    """Low-precision copies follow their weights."""
    with torch.no_grad():
        for trainable in trainables:
            if trainable.low is not None:
                trainable.low.copy_(trainable.weight)
