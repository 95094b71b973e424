"""Every layout of a model on a cluster, as blocks of columns that broadcast.

A block has six axes: meshes with everything that shapes a micro batch (rows), ZeRO with its shard group, recomputation,
when gradients are reduced, whether the optimizer is swapped, and whether activations are offloaded. What depends on
rows alone is then computed once for the hundreds of layouts that share it, and so on for each axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from cost_models.layout import COLUMN_NAMES, CP_KINDS, PLACEMENTS, RECOMPUTES, Layouts
from cost_models.schedules import GPIPE, INTERLEAVED, NONE, ONE_F_ONE_B, ZB_V, ZERO_BUBBLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cost_models.setting import Setting
    from planner.bounds import Bounds

# Layers that first and last stage together may hold fewer than the others: embedding and head stand for them.
MOST_SHORT = 3
# Rows that are filtered by the rules together.
_MOST_ROWS = 100_000
# Layouts in a block: large enough that NumPy's call overhead vanishes, small enough to stay in cache and memory.
BLOCK_LAYOUTS = 400_000

_ROW_NAMES = (
    "tp", "sp", "cp", "cp_kind", "ep", "pp", "dp", "schedule", "vpp", "short_first", "short_last", "micro_batch",
    "accumulation", "placement",
)  # fmt: skip
_SWITCHES = ("recompute", "reduce_gradients", "swap_optimizer", "activation_offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What shapes a micro batch, one row each, all with one dp; `choices` are the axes that multiply them."""

    dp: int
    columns: np.ndarray
    choices: tuple[np.ndarray, ...]

    @property
    def layouts_per_row(self) -> int:
        """Layouts that each row stands for."""
        return math.prod(len(axis) for axis in self.choices)

    def plain(self) -> Layouts:
        """The rows with the plainest choice (ZeRO-0, no recomputation, nothing swapped), in six axes."""
        plainest = (np.array([[0, 1]]), *(np.array([0]) for _ in range(4)))
        return _block(self.columns, plainest)

    def keep(self, which: np.ndarray) -> Rows:
        """Some of the rows."""
        return replace(self, columns=self.columns[which])

    def block(self) -> Layouts:
        """All layouts of the rows."""
        return _block(self.columns, self.choices)

    def parts(self) -> Iterator[Rows]:
        """The rows in parts of bounded size and one schedule each, whose closed form then runs once."""
        step = max(1, BLOCK_LAYOUTS // self.layouts_per_row)
        schedule = self.columns[:, _ROW_NAMES.index("schedule")]
        for code in np.unique(schedule):
            which = np.flatnonzero(schedule == code)
            for start in range(0, len(which), step):
                yield self.keep(which[start : start + step])


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The space of one setting under bounds."""

    setting: Setting
    bounds: Bounds

    def rows(self) -> Iterator[Rows]:
        """All rows, some hundred thousand at a time at the most; `recompute: layers=N` comes by `with_layers`."""
        for dp in self.bounds.keep("dp", _divisors(self.setting.n_devices)):
            choices = self._choices(dp)
            if all(len(axis) for axis in choices):
                for columns in self._gathered(dp):
                    yield Rows(dp=dp, columns=columns, choices=choices)

    def _gathered(self, dp: int) -> Iterator[np.ndarray]:
        """Rows of several meshes together, up to a bound."""
        parts: list[np.ndarray] = []
        for mesh in self._meshes(dp):
            parts.append(mesh)
            if sum(map(len, parts)) >= _MOST_ROWS:
                yield np.concatenate(parts)
                parts = []
        if parts:
            yield np.concatenate(parts)

    def with_layers(self, layouts: Layouts) -> Layouts:
        """For layouts (one-dimensional columns, recompute full) each choice of `layers=N` below a whole stage."""
        fixed = self.bounds.value_of("recompute_layers")
        slots = self.setting.model.n_layers + layouts.short_first + layouts.short_last
        per_stage = slots // (layouts.pp * layouts.vpp)
        most = dict(self.bounds.most).get("recompute_layers")
        counts = np.maximum(per_stage - 1, 0)
        if most is not None:
            counts = np.minimum(counts, most)
        which = np.repeat(np.arange(len(counts)), counts)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        chosen = np.arange(len(which)) - starts + 1
        if fixed is not None:
            which, chosen = which[chosen == fixed], chosen[chosen == fixed]
        return replace(layouts.take(which), recompute_layers=chosen)

    def layer_choices(self, layouts: Layouts) -> np.ndarray:
        """How many `layers=N` layouts each layout stands for."""
        slots = self.setting.model.n_layers + layouts.short_first + layouts.short_last
        return np.maximum(slots // (layouts.pp * layouts.vpp) - 1, 0)

    def _meshes(self, dp: int) -> Iterator[np.ndarray]:
        """Rows of each mesh (tp, cp, pp) beside this dp."""
        keep, rest = self.bounds.keep, self.setting.n_devices // dp
        for tp in keep("tp", _divisors(rest)):
            for cp in keep("cp", _divisors(rest // tp)):
                pp = rest // tp // cp
                if self.bounds.allows("pp", pp):
                    yield self._mesh_rows(tp, cp, pp, dp)

    def _mesh_rows(self, tp: int, cp: int, pp: int, dp: int) -> np.ndarray:
        """The product of the mesh's own choices, in the order of `_ROW_NAMES`."""
        keep = self.bounds.keep
        choices: list[list[tuple[int, ...]]] = [
            [(tp,)],
            [(sp,) for sp in keep("sp", [1, 0] if tp > 1 else [0])],
            [(cp, kind) for kind in keep("cp_kind", list(range(1, len(CP_KINDS))) if cp > 1 else [0])],
            [(ep,) for ep in self._experts(tp * cp * dp)],
            [(pp, dp)],
            self._pipelines(pp),
            self._batches(dp),
            [(placement,) for placement in self._placements(pp, dp)],
        ]
        return _product(choices)

    def _pipelines(self, pp: int) -> list[tuple[int, ...]]:
        """Schedule, virtual stages, and the layers that first and last stage are short."""
        if pp == 1:
            choices = [(NONE, 1)]
        else:
            most = max(self.setting.model.n_layers // pp, 2)
            choices = [(ONE_F_ONE_B, 1), (GPIPE, 1), (ZB_V, 2)]
            choices += [(INTERLEAVED, vpp) for vpp in range(2, most + 1)]
            choices += [(ZERO_BUBBLE, vpp) for vpp in range(1, most + 1)]
        return [
            (schedule, vpp, *self._short(pp * vpp))
            for schedule, vpp in choices
            if self.bounds.allows("schedule", schedule) and self.bounds.allows("vpp", vpp)
        ]

    def _short(self, stages: int) -> tuple[int, int]:
        missing = -self.setting.model.n_layers % stages
        return (missing // 2, missing - missing // 2) if 0 < missing <= MOST_SHORT and stages > 1 else (0, 0)

    def _batches(self, dp: int) -> list[tuple[int, ...]]:
        """Micro batch and accumulation; where dp does not divide the batch one row stands for all, to be rejected."""
        share, left = divmod(self.setting.workload.global_batch, dp)
        if left:
            return [(1, max(share, 1))] if self.bounds.allows("micro_batch", 1) else []
        return [
            (micro, share // micro)
            for micro in self.bounds.keep("micro_batch", _divisors(share))
            if self.bounds.allows("accumulation", share // micro)
        ]

    def _placements(self, pp: int, dp: int) -> list[int]:
        """Where pp and dp both exist and the job leaves a node, one of them must go far."""
        differs = pp > 1 and dp > 1 and self.setting.n_devices > self.setting.cluster.tiers[0].devices
        return self.bounds.keep("placement", list(range(len(PLACEMENTS))) if differs else [0])

    def _experts(self, ranks: int) -> list[int]:
        moe = self.setting.model.moe
        return self.bounds.keep("ep", [e for e in _divisors(moe.experts) if e <= ranks] if moe else [1])

    def _choices(self, dp: int) -> tuple[np.ndarray, ...]:
        """ZeRO with shards, then one axis each of `_SWITCHES`."""
        zero = [(0, 1), *((z, d) for z in (1, 2, 3) for d in _divisors(dp))]
        zero = [(z, d) for z, d in zero if self.bounds.allows("zero", z) and self.bounds.allows("dp_shard", d)]
        counts = {"recompute": len(RECOMPUTES)}
        switches = (np.array(self.bounds.keep(name, list(range(counts.get(name, 2))))) for name in _SWITCHES)
        return np.array(zero).reshape(-1, 2), *switches


def _block(rows: np.ndarray, choices: tuple[np.ndarray, ...]) -> Layouts:
    """Columns that vary along one axis each: rows, ZeRO, then the switches."""
    zero, *switches = choices
    columns = {name: _along(0, rows[:, i]) for i, name in enumerate(_ROW_NAMES)}
    columns["zero"], columns["dp_shard"] = _along(1, zero[:, 0]), _along(1, zero[:, 1])
    columns |= {name: _along(2 + i, values) for i, (name, values) in enumerate(zip(_SWITCHES, switches, strict=True))}
    columns["recompute_layers"] = _along(0, np.zeros(1, dtype=np.int64))
    return Layouts(**{name: columns[name] for name in COLUMN_NAMES})


def _along(axis: int, values: np.ndarray) -> np.ndarray:
    """Values along one of the six axes of a block."""
    return values.reshape(*(len(values) if i == axis else 1 for i in range(2 + len(_SWITCHES))))


def _product(choices: list[list[tuple[int, ...]]]) -> np.ndarray:
    """Every combination of one tuple from each list, joined, as rows of integers."""
    lengths = [len(options) for options in choices]
    if 0 in lengths:
        return np.empty((0, len(_ROW_NAMES)), dtype=np.int64)
    which = np.unravel_index(np.arange(math.prod(lengths)), lengths)
    return np.concatenate([np.array(options)[index] for options, index in zip(choices, which, strict=True)], axis=1)


@cache
def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
