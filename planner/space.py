"""Every layout of a model on a cluster, as blocks of columns that broadcast.

A block has six axes: meshes with everything that shapes a micro batch (rows), ZeRO with its shard group and when it
reduces gradients, recomputation, whether the optimizer is swapped, whether activations are offloaded, the placement.
What depends on rows alone is then computed once for the hundreds of layouts that share it, and so on for each axis.
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
BLOCK_LAYOUTS = 800_000

_ROW_NAMES = (
    "tp", "sp", "cp", "cp_kind", "ep", "pp", "dp", "schedule", "vpp", "short_first", "short_last", "micro_batch",
    "accumulation",
)  # fmt: skip
_SHARDING = ("zero", "dp_shard", "reduce_gradients")
_SWITCHES = ("recompute", "swap_optimizer", "activation_offload", "placement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One tp x cp x pp x dp with what multiplies it: `row_choices` into rows, `choices` each row into layouts."""

    dp: int
    row_choices: tuple[list[tuple[int, ...]], ...]
    choices: tuple[np.ndarray, ...]

    @property
    def kind(self) -> tuple[int, int]:
        """Meshes of one kind share their choices: they have the same dp and the same placements."""
        return self.dp, len(self.choices[-1])

    @property
    def n_rows(self) -> int:
        """Rows of the mesh."""
        return math.prod(map(len, self.row_choices))

    @property
    def n_layouts(self) -> int:
        """Layouts of the mesh."""
        return self.n_rows * math.prod(map(len, self.choices))

    @property
    def first_row(self) -> tuple[int, ...]:
        """One row, for the rules that all rows share."""
        return tuple(value for options in self.row_choices for value in options[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What shapes a micro batch, one row each, all with one dp; `choices` are the axes that multiply them.

    Attributes:
        recompute_layers: as of a Layout; of all layouts of the rows alike.
    """

    dp: int
    columns: np.ndarray
    choices: tuple[np.ndarray, ...]
    recompute_layers: int = 0

    @property
    def layouts_per_row(self) -> int:
        """Layouts that each row stands for."""
        return math.prod(len(axis) for axis in self.choices)

    def plain(self) -> Layouts:
        """The rows with the plainest choices (ZeRO-0, no recomputation, nothing swapped) in each placement."""
        placements = self.choices[-1] if self.choices else np.array([0])
        return _block(self.columns, (np.array([[0, 1, 0]]), *(np.array([0]) for _ in _SWITCHES[1:]), placements))

    def keep(self, which: np.ndarray) -> Rows:
        """Some of the rows."""
        return replace(self, columns=self.columns[which])

    def block(self) -> Layouts:
        """All layouts of the rows."""
        return _block(self.columns, self.choices, self.recompute_layers)

    def parts(self) -> Iterator[Rows]:
        """The rows in parts of a bounded number of layouts."""
        step = max(1, BLOCK_LAYOUTS // self.layouts_per_row)
        for start in range(0, len(self.columns), step):
            yield replace(self, columns=self.columns[start : start + step])

    @property
    def schedule(self) -> np.ndarray:
        """Code of each row's schedule: rows of one schedule are timed together, by one closed form."""
        return self.columns[:, _ROW_NAMES.index("schedule")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The space of one setting under bounds."""

    setting: Setting
    bounds: Bounds

    def meshes(self) -> list[Mesh]:
        """Every mesh with at least one layout inside the bounds."""
        keep, devices = self.bounds.keep, self.setting.n_devices
        found = [
            self._mesh(tp, cp, devices // (dp * tp * cp), dp)
            for dp in keep("dp", _divisors(devices))
            for tp in keep("tp", _divisors(devices // dp))
            for cp in keep("cp", _divisors(devices // dp // tp))
            if self.bounds.allows("pp", devices // (dp * tp * cp))
        ]
        return [mesh for mesh in found if mesh.n_layouts]

    def rows(self, meshes: list[Mesh]) -> Iterator[Rows]:
        """Rows of the meshes, those of one dp together, some hundred thousand at a time at the most."""
        gathered: list[Mesh] = []
        for mesh in sorted(meshes, key=lambda mesh: mesh.kind):
            if gathered and (mesh.kind != gathered[0].kind or sum(m.n_rows for m in gathered) > _MOST_ROWS):
                yield self._rows_of(gathered)
                gathered = []
            gathered.append(mesh)
        if gathered:
            yield self._rows_of(gathered)

    @property
    def layer_bounds(self) -> tuple[int, int] | None:
        """Fewest and most layers of a virtual stage that `layers=N` may recompute; None where recomputation is fixed.

        Fixed to some N, it is the N of every layout of the space, and nothing is left to choose.
        """
        if any(self.bounds.value_of(name) is not None for name in ("recompute", "recompute_layers")):
            return None
        return 1, dict(self.bounds.most).get("recompute_layers", self.setting.model.n_layers)

    def _rows_of(self, meshes: list[Mesh]) -> Rows:
        return Rows(
            dp=meshes[0].dp,
            columns=np.concatenate([_product(mesh.row_choices) for mesh in meshes]),
            choices=meshes[0].choices,
            recompute_layers=self.bounds.value_of("recompute_layers") or 0,
        )

    def _mesh(self, tp: int, cp: int, pp: int, dp: int) -> Mesh:
        """A mesh with the choices that multiply it, in the order of `_ROW_NAMES`."""
        keep = self.bounds.keep
        return Mesh(
            dp=dp,
            row_choices=(
                [(tp,)],
                [(sp,) for sp in keep("sp", [1, 0] if tp > 1 else [0])],
                [(cp, kind) for kind in keep("cp_kind", list(range(1, len(CP_KINDS))) if cp > 1 else [0])],
                [(ep,) for ep in self._experts(tp * cp * dp)],
                [(pp, dp)],
                self._pipelines(pp),
                self._batches(dp),
            ),
            choices=self._choices(pp, dp),
        )

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

    def _experts(self, ranks: int) -> list[int]:
        moe = self.setting.model.moe
        return self.bounds.keep("ep", [e for e in _divisors(moe.experts) if e <= ranks] if moe else [1])

    def _choices(self, pp: int, dp: int) -> tuple[np.ndarray, ...]:
        """ZeRO with shards and reduction, then one axis each of `_SWITCHES`.

        Reducing after every micro batch is a choice of ZeRO-2 and 3: elsewhere it only adds traffic.
        """
        zero = [(0, 1, 0)]
        zero += [(z, d, every) for z in (1, 2, 3) for every in range(1 + (z >= 2)) for d in _divisors(dp)]
        zero = [choice for choice in zero if all(map(self.bounds.allows, _SHARDING, choice))]
        switches = [self.bounds.keep(name, values) for name, values in self._switches(pp, dp).items()]
        return np.array(zero).reshape(-1, len(_SHARDING)), *map(np.array, switches)

    def _switches(self, pp: int, dp: int) -> dict[str, list[int]]:
        """Where pp and dp both exist and the job leaves the innermost tier, one of them must go far."""
        far = pp > 1 and dp > 1 and self.setting.n_devices > self.setting.cluster.tiers[0].devices
        placements = list(range(len(PLACEMENTS))) if far else [0]
        return dict(zip(_SWITCHES, (list(range(len(RECOMPUTES))), [0, 1], [0, 1], placements), strict=True))


def _block(rows: np.ndarray, choices: tuple[np.ndarray, ...], recompute_layers: int = 0) -> Layouts:
    """Columns that vary along one axis each: rows, sharding, then the switches."""
    sharding, *switches = choices
    columns = {name: _along(0, rows[:, i]) for i, name in enumerate(_ROW_NAMES)}
    columns |= {name: _along(1, sharding[:, i]) for i, name in enumerate(_SHARDING)}
    columns |= {name: _along(2 + i, values) for i, (name, values) in enumerate(zip(_SWITCHES, switches, strict=True))}
    columns["recompute_layers"] = _along(0, np.array([recompute_layers]))
    return Layouts(**{name: columns[name] for name in COLUMN_NAMES})


def _along(axis: int, values: np.ndarray) -> np.ndarray:
    """Values along one of the six axes of a block."""
    return values.reshape(*(len(values) if i == axis else 1 for i in range(2 + len(_SWITCHES))))


def plain_rows(meshes: list[Mesh]) -> Layouts:
    """One row a mesh, with the plainest choices."""
    return Rows(dp=0, columns=np.array([mesh.first_row for mesh in meshes]), choices=()).plain()


def _product(choices: tuple[list[tuple[int, ...]], ...]) -> np.ndarray:
    """Every combination of one tuple from each list, joined, as rows of integers."""
    lengths = [len(options) for options in choices]
    which = np.unravel_index(np.arange(math.prod(lengths)), lengths)
    return np.concatenate([np.array(options)[index] for options, index in zip(choices, which, strict=True)], axis=1)


@cache
def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
