"""ZeRO-1 to 3 on one rank: gathers of weights and reductions of gradients, unit by unit through the rank's actions.

Whether a unit's weights are whole at a moment is a matter of what came before, so the actions are followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from cost_models.schedules import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cost_models.model import ModelSpec
    from cost_models.rank_messages import RankGroups, Tally
    from cost_models.rank_parameters import Parameter

_FP32 = 4


def shard_axis(shape: Sequence[int], shards: int) -> int:
    """The axis that ZeRO cuts: the first that splits evenly, or the first of all, whose shards are then padded."""
    return next((axis for axis, length in enumerate(shape) if length % shards == 0), 0)


def padded_numel(shape: Sequence[int], shards: int) -> int:
    """Elements of all shards together, each as long as the longest."""
    axis = shard_axis(shape, shards)
    return -(-shape[axis] // shards) * shards * prod(shape) // shape[axis]


def own_numel(shape: Sequence[int], shards: int, place: int) -> int:
    """Elements of one shard without padding."""
    axis = shard_axis(shape, shards)
    each = -(-shape[axis] // shards)
    held = min(max(shape[axis] - place * each, 0), each)
    return held * prod(shape) // shape[axis]


@dataclass(slots=True)
class _Unit:
    """What is gathered and reduced as one message.

    Attributes:
        stays: gathered weights are kept from forward to backward.
        in_backward: backward reads the weights.
        whole: the weights are gathered now.
        waiting: parameters whose gradients are not reduced yet.
    """

    name: str
    mesh: str
    shards: int
    stays: bool
    in_backward: bool
    parameters: list[Parameter] = field(default_factory=list)
    whole: bool = False
    waiting: set[str] = field(default_factory=set)

    def inside(self, other: _Unit) -> bool:
        """Whether backward runs within that of another unit."""
        return other.name == "root" or self.name.startswith(f"{other.name}.")

    def leave(self, *, shards: bool) -> None:
        """Backward is through."""
        self.whole = self.whole and not shards


class ShardTraffic:
    """One stage's units through forward and backward of each micro batch.

    Args:
        alone: the stage is the whole model, so that the head's backward follows its forward.
    """

    def __init__(
        self, model: ModelSpec, groups: RankGroups, parameters: Iterable[Parameter], weight_bytes: int, *, alone: bool
    ) -> None:
        self._x, self._weight_bytes = groups.layout, weight_bytes
        units: dict[str, _Unit] = {}
        for parameter in parameters:
            name = parameter.unit
            if name not in units:
                mesh = groups.mesh_of(expert=parameter.expert)
                kept = name == "root" or (name == "head" and alone)
                units[name] = _Unit(
                    name,
                    mesh,
                    groups.size(f"{mesh}_shard"),
                    stays=self._x.zero < 3 or kept,
                    in_backward=name != "embedding" or model.embedding_norm,
                )
            units[name].parameters.append(parameter)
        self._units = _as_left(list(units.values()))
        self._backwards = self._weights = 0

    def tell(self, tally: Tally, kinds: Iterable[str]) -> None:
        """Follow the actions of a stage: F, B, I and W."""
        for kind in kinds:
            if kind == FORWARD:
                self._forward(tally)
            elif kind in {BACKWARD, INPUT_GRAD}:
                self._backward(tally, split=kind == INPUT_GRAD)
            elif kind == WEIGHT_GRAD:
                self._weight_gradients(tally)

    def _forward(self, tally: Tally) -> None:
        for unit in self._units:
            self._gather(tally, unit)
            unit.whole = unit.stays

    def _backward(self, tally: Tally, *, split: bool) -> None:
        self._backwards += 1
        last, every = self._backwards == self._x.accumulation, self._x.reduce_gradients == "every"
        reduces, shards = (last or every) and not split, self._x.zero == 3 or (last and not split)
        entered: list[_Unit] = []
        for unit in reversed(self._units):
            while entered and not unit.inside(entered[-1]):
                entered.pop().leave(shards=shards)
            entered.append(unit)
            if unit.in_backward:
                self._gather(tally, unit)
            unit.waiting |= {p.name for p in unit.parameters if not (split and p.deferred)}
            if reduces:
                self._reduce(tally, unit, last=last)
        for unit in entered:
            unit.leave(shards=shards)

    def _weight_gradients(self, tally: Tally) -> None:
        self._weights += 1
        reduces = self._weights == self._x.accumulation or self._x.reduce_gradients == "every"
        for unit in self._units:
            unit.waiting |= {p.name for p in unit.parameters if p.deferred}
            if reduces:
                self._reduce(tally, unit, last=True)
        if reduces:
            for unit in self._units:
                unit.whole = False

    def _gather(self, tally: Tally, unit: _Unit) -> None:
        if not unit.whole:
            elements = sum(padded_numel(p.shape, unit.shards) for p in unit.parameters)
            tally.add(f"{unit.mesh}_shard", "all_gather", elements * self._weight_bytes)
        unit.whole = True

    def _reduce(self, tally: Tally, unit: _Unit, *, last: bool) -> None:
        """Over shards, and with the last of the step, or of those that come apart, over their replicas."""
        elements = sum(padded_numel(p.shape, unit.shards) for p in unit.parameters if p.name in unit.waiting)
        tally.add(f"{unit.mesh}_shard", "reduce_scatter", elements * _FP32)
        if last:
            tally.add(f"{unit.mesh}_replicate", "all_reduce", elements // unit.shards * _FP32)
        unit.waiting.clear()


def _as_left(units: list[_Unit]) -> list[_Unit]:
    """In the order in which forward leaves them: experts before their layer, the root last."""
    ordered: list[_Unit] = []
    for unit in units:
        if unit.name != "root" and not unit.name.endswith("experts"):
            ordered += [*(inner for inner in units if inner.name == f"{unit.name}.experts"), unit]
    return ordered + [unit for unit in units if unit.name == "root"]
