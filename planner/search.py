"""Exhaustive search in columns: rules, then memory, then time; the best, the front, and why the rest lost.

Every layout is decided. Rows (all that shapes a micro batch) that break a rule are dropped with all their layouts.
Memory is decided for each layout that is left. Time is evaluated from the row with the lowest bound upward, until the
bounds prove that no later row can enter the best or the front.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from cost_models.layout import RECOMPUTES, Layout, Layouts
from cost_models.memory import MemoryModel
from cost_models.prediction import host_budget_bytes, usable_bytes
from cost_models.rules import CHOICE_RULES, MESH_RULES, RULES, first_violations
from cost_models.step_time import StepTimeModel
from planner.candidates import Best, Candidates, Front, FrontPoint
from planner.space import Mesh, Rows, Space, plain_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from cost_models.setting import Setting
    from planner.bounds import Bounds

M_DEVICE, M_HOST = "M101", "M102"
# Best layouts kept for the tables.
KEPT = 100
_NONE, _FULL = RECOMPUTES.index("none"), RECOMPUTES.index("full")
# Layouts whose time is evaluated together: small, so that the first blocks soon bound the rest.
TIMED_LAYOUTS = 200_000
# Layouts with `layers=N` that are evaluated together: no axis is shared among them.
_LAYER_CHOICES = 100_000
# Layouts whose peak is formed together for the best and the front.
_OFFERED = 2_000
_RECOMPUTE_AXIS, _OFFLOAD_AXIS = 2, 4
# Nearest layouts told, and rows that are evaluated together to find them.
_NEAREST, _NEAR_ROWS = 3, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """A layout that breaks no rule but does not fit, and the bytes that it lacks."""

    layout: Layout
    lacking_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: fitting layouts in rank order, at most `KEPT`.
        front: the fastest layouts at each level of headroom, fastest first.
        nearest: where nothing fits, the layouts that lack the least, no two of them alike but for ZeRO, recomputation,
            swap and placement.
        layouts: layouts of the space, each decided; `recompute: layers=N` apart.
        layer_choices: layouts with `layers=N` whose lower bound let them compete.
        timed: layouts whose step time was evaluated; the other fitting ones were proved slower by a bound.
        feasible: layouts that keep every rule and fit.
        rejected: layouts by the code of the first rule that they break, or by the memory that they lack.
        examples: one of the rejected layouts for each code.
        evaluate_s: seconds of rules, memory and time.
    """

    best: Candidates | None
    front: tuple[FrontPoint, ...]
    nearest: tuple[Nearest, ...]
    layouts: int
    layer_choices: int
    timed: int
    feasible: int
    rejected: dict[str, int]
    examples: dict[str, Layout]
    evaluate_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitting:
    """Rows with at least one fitting layout, of one dp and schedule, with bounds on their layouts.

    Attributes:
        fits: bits of which layouts of each row fit.
    """

    rows: Rows
    least_step_s: np.ndarray
    least_peak_bytes: np.ndarray
    fits: np.ndarray


@dataclass(slots=True)
class _Search:
    """One run; the fields gather what blocks find."""

    space: Space
    margin_bytes: float
    best: Best
    front: Front
    progress: Callable[[int, int], None]
    # Rows with the bounds of their peaks, as long as nothing fits.
    lacking: list[tuple[np.ndarray, Rows]] = field(default_factory=list)
    layouts: int = 0
    layer_choices: int = 0
    timed: int = 0
    feasible: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Layout] = field(default_factory=dict)
    fitting: list[_Fitting] = field(default_factory=list)
    fewest: list[tuple[Layouts, np.ndarray]] = field(default_factory=list)
    every: list[tuple[Layouts, np.ndarray]] = field(default_factory=list)

    @property
    def setting(self) -> Setting:
        return self.space.setting

    @property
    def limit_bytes(self) -> float:
        return usable_bytes(self.setting) - self.margin_bytes

    @property
    def host_limit_bytes(self) -> float:
        return host_budget_bytes(self.setting) / min(self.setting.cluster.devices_per_node, self.setting.n_devices)

    def run(self) -> None:
        """Decide rules and memory of all layouts, then time in the order of the bounds."""
        for rows in self.space.rows(self._open_meshes()):
            for part in self._filtered(rows).parts():
                self._decide(part)
            self.progress(sum(self.rejected.values()) + self.feasible, self.layouts)
        self.fitting.sort(key=lambda part: float(part.least_step_s[0]))
        for fitting in self.fitting:
            self._time(fitting)
        if self.space.layer_bounds:
            self._some_layers(*self.space.layer_bounds)

    def _open_meshes(self) -> list[Mesh]:
        """Meshes that break no rule which all their layouts would break; all layouts are counted here."""
        meshes = self.space.meshes()
        self.layouts = sum(mesh.n_layouts for mesh in meshes)
        broken = first_violations(self.setting, plain_rows(meshes), MESH_RULES).reshape(-1) if meshes else ()
        for mesh, index in zip(meshes, broken, strict=True):
            if index >= 0:
                self.rejected[MESH_RULES[index].code] += mesh.n_layouts
                self._example(MESH_RULES[index].code, lambda mesh=mesh: next(self.space.rows([mesh])).block().one(0))  # type: ignore[misc]
        return [mesh for mesh, index in zip(meshes, broken, strict=True) if index < 0]

    def _filtered(self, rows: Rows) -> Rows:
        """Drop rows that break a rule whatever the choices; count every layout they stand for."""
        broken = first_violations(self.setting, rows.plain()).reshape(len(rows.columns))
        for index, count in zip(*np.unique(broken[broken >= 0], return_counts=True), strict=True):
            self.rejected[RULES[index].code] += int(count) * rows.layouts_per_row
            first = np.flatnonzero(broken == index)[:1]
            self._example(RULES[index].code, lambda first=first: rows.keep(first).block().one(0))  # type: ignore[misc]
        return rows.keep(broken < 0)

    def _decide(self, rows: Rows) -> None:
        """Choice rules and memory of all layouts of some rows; rows with one that fits are kept with their bounds."""
        block = rows.block()
        valid = self._valid(block)
        memory = MemoryModel(self.setting, block)
        roomy = memory.fits(self.limit_bytes, valid) & valid
        fits = roomy & memory.fits_host(self.host_limit_bytes)
        n_valid = int(np.count_nonzero(valid)) * (block.size // valid.size)
        n_roomy, n_fits = (int(np.count_nonzero(which)) * (block.size // which.size) for which in (roomy, fits))
        self.rejected[M_DEVICE] += n_valid - n_roomy
        self.rejected[M_HOST] += n_roomy - n_fits
        if n_valid > n_roomy:
            self._example(M_DEVICE, lambda: _first(block, valid & ~roomy))
        if n_roomy > n_fits:
            self._example(M_HOST, lambda: _first(block, roomy & ~fits))
        self.feasible += n_fits
        some = np.flatnonzero(fits.any(axis=tuple(range(1, fits.ndim))))
        self.lacking = [] if self.feasible else [*self.lacking, (memory.least_peak_bytes(), rows)]
        if len(some):
            kept = rows.keep(some)
            least = StepTimeModel(self.setting, kept.plain()).least_step_s().reshape(len(some), -1).min(axis=1)
            bits = np.packbits(np.broadcast_to(fits, block.shape)[some].reshape(len(some), -1), axis=1)
            self._keep(kept, least, memory.least_peak_bytes()[some], bits)

    def _keep(self, rows: Rows, least_step_s: np.ndarray, least_peak_bytes: np.ndarray, fits: np.ndarray) -> None:
        """Rows to be timed, in parts of one schedule with their bounds, the fastest first."""
        order = np.argsort(least_step_s)
        for code in np.unique(rows.schedule):
            same = order[rows.schedule[order] == code]
            parts = min(max(1, len(same) * rows.layouts_per_row // TIMED_LAYOUTS), len(same))
            self.fitting += [
                _Fitting(
                    rows=rows.keep(which),
                    least_step_s=least_step_s[which],
                    least_peak_bytes=least_peak_bytes[which],
                    fits=fits[which],
                )
                for which in np.array_split(same, parts)
            ]

    def _valid(self, block: Layouts) -> np.ndarray:
        """The choice rules, in the shape of what they depend on, with the layouts that break them counted."""
        broken = first_violations(self.setting, block, CHOICE_RULES)
        share = block.size // broken.size
        for index, count in enumerate(np.bincount((broken + 1).reshape(-1), minlength=len(CHOICE_RULES) + 1)[1:]):
            if count:
                self.rejected[CHOICE_RULES[index].code] += int(count) * share
                self._example(CHOICE_RULES[index].code, lambda index=index: _first(block, broken == index))  # type: ignore[misc]
        return broken < 0

    def _example(self, code: str, layout: Callable[[], Layout]) -> None:
        if code not in self.examples:
            self.examples[code] = layout()

    def _time(self, part: _Fitting) -> None:
        """Evaluate the rows that can still enter the best or the front."""
        level = self.front.level(self.front.usable_bytes - part.least_peak_bytes)
        open_ = (part.least_step_s <= self.best.limit_s) | (part.least_step_s < self.front.step_s[level])
        if not open_.any():
            return
        block = part.rows.keep(open_).block()
        memory = MemoryModel(self.setting, block)
        fits = np.unpackbits(part.fits[open_], axis=1, count=part.rows.layouts_per_row).reshape(block.shape) > 0
        step = np.broadcast_to(StepTimeModel(self.setting, block).step_s(), block.shape)
        self.timed += block.size
        if self.space.layer_bounds:
            self._note_layers(block, fits, step)
        self._offer(block, np.where(fits, step, np.inf), np.broadcast_to(memory.least_peaks_bytes(), block.shape))

    def _offer(self, block: Layouts, step_s: np.ndarray, least_peak_bytes: np.ndarray) -> None:
        """Form the peaks of what can enter the best or the front, the fastest first: it soon rules out the rest."""
        step, level = step_s.reshape(-1), self.front.level(self.front.usable_bytes - least_peak_bytes.reshape(-1))
        left = np.flatnonzero(step < np.inf)
        left = left[np.argsort(step[left], kind="stable")]
        while len(left):
            left = left[(step[left] <= self.best.limit_s) | (step[left] < self.front.step_s[level[left]])]
            which, left = left[:_OFFERED], left[_OFFERED:]
            if len(which):
                some = block.take(which)
                peak = MemoryModel(self.setting, some).peak_bytes()
                self.best.offer(some, step[which], peak)
                self.front.offer(some, step[which], peak)

    def _note_layers(self, block: Layouts, fits: np.ndarray, step: np.ndarray) -> None:
        """Note the layouts that fit with all layers recomputed and might be faster with fewer.

        Without offload time grows with N and memory falls: where no layer need be recomputed none is, else the fewest
        that make it fit. With offload, recomputing a layer also spares its transfer: every N is evaluated. Waiting for
        transfers is no bound then, for a layout that recomputes waits for fewer; the same without offload is.
        """
        codes = block.recompute.reshape(-1).tolist()
        if _FULL not in codes:
            return
        full = fits.take([codes.index(_FULL)], axis=_RECOMPUTE_AXIS)
        none = fits.take([codes.index(_NONE)], axis=_RECOMPUTE_AXIS) if _NONE in codes else np.zeros_like(full)
        offloads = np.broadcast_to(block.activation_offload, full.shape) == 1
        bound = np.zeros(full.shape)
        if _NONE in codes and not block.activation_offload.flat[0]:
            plain = step.take([codes.index(_NONE)], axis=_RECOMPUTE_AXIS)
            bound = np.broadcast_to(plain.take([0], axis=_OFFLOAD_AXIS), full.shape)
        every = replace(block, recompute=np.full((1,) * fits.ndim, _FULL))
        for wanted, kept in ((full & ~none & ~offloads, self.fewest), (full & offloads, self.every)):
            which = np.flatnonzero(wanted & (bound <= self.best.limit_s))
            if len(which):
                kept.append((every.take(which), bound.reshape(-1)[which]))

    def _some_layers(self, fewest: int, most: int) -> None:
        """Evaluate what was noted, as far as it can still enter the best."""
        self._offer_fewest(self._still_open(self.fewest), fewest, most)
        self._offer_every(self._still_open(self.every), fewest, most)

    def _still_open(self, noted: list[tuple[Layouts, np.ndarray]]) -> Layouts | None:
        """Of noted layouts those whose bound does not yet rule them out."""
        open_ = [layouts.take(np.flatnonzero(bound <= self.best.limit_s)) for layouts, bound in noted]
        return Layouts.joined(open_) if any(layouts.size for layouts in open_) else None

    def _offer_every(self, full: Layouts | None, fewest: int, most: int) -> None:
        """Each `layers=N` of these layouts."""
        if full is None:
            return
        counts = np.maximum(np.minimum(self._layers_below(full), most) - fewest + 1, 0)
        self.layer_choices += int(counts.sum())
        for part in np.array_split(np.arange(len(counts)), int(counts.sum()) // _LAYER_CHOICES + 1):
            which = np.repeat(part, counts[part])
            starts = np.repeat(np.cumsum(counts[part]) - counts[part], counts[part])
            some = replace(full.take(which), recompute_layers=np.arange(len(which)) - starts + fewest)
            self._offer_layouts(some.take(np.flatnonzero(self._fits(some))))

    def _layers_below(self, layouts: Layouts) -> np.ndarray:
        """The most layers that `layers=N` can mean: all of a virtual stage is `full`."""
        slots = self.setting.model.n_layers + layouts.short_first + layouts.short_last
        return slots // (layouts.pp * layouts.vpp) - 1

    def _offer_layouts(self, layouts: Layouts) -> None:
        if not layouts.size:
            return
        step = np.broadcast_to(StepTimeModel(self.setting, layouts).step_s(), layouts.shape)
        peak = np.broadcast_to(MemoryModel(self.setting, layouts).peak_bytes(), layouts.shape)
        self.best.offer(layouts, step, peak)
        self.front.offer(layouts, step, peak)

    def _offer_fewest(self, full: Layouts | None, fewest: int, most: int) -> None:
        """Bisect the smallest `layers=N` that fits, for many layouts at once."""
        if full is None:
            return
        high = np.minimum(self._layers_below(full), most)
        self.layer_choices += int(np.maximum(high - fewest + 1, 0).sum())
        can = np.flatnonzero(high >= fewest)
        full, high = full.take(can), high[can]
        can = np.flatnonzero(self._fits(replace(full, recompute_layers=high)))
        full, high = full.take(can), high[can]
        low = np.full_like(high, fewest)
        while (low < high).any():
            middle = (low + high) // 2
            fine = self._fits(replace(full, recompute_layers=middle))
            low, high = np.where(fine, low, middle + 1), np.where(fine, middle, high)
        self._offer_layouts(replace(full, recompute_layers=high))

    def _fits(self, block: Layouts) -> np.ndarray:
        """Which layouts keep the choice rules and fit device and host, in the full shape."""
        if not block.size:
            return np.zeros(block.shape, dtype=bool)
        memory = MemoryModel(self.setting, block)
        valid = (first_violations(self.setting, block, CHOICE_RULES) < 0) & memory.fits_host(self.host_limit_bytes)
        return np.broadcast_to(memory.fits(self.limit_bytes, valid) & valid, block.shape)

    def nearest(self) -> tuple[Nearest, ...]:
        """Where nothing fits: of the rows that lack the least device memory the layouts that do."""
        found: list[Nearest] = []
        for least, rows in sorted(self.lacking, key=lambda pair: float(pair[0].min())):
            order = np.argsort(least)
            for part in np.array_split(order, len(order) // _NEAR_ROWS + 1):
                limit = found[-1].lacking_bytes if len(found) == _NEAREST else np.inf
                open_ = part[least[part] - self.limit_bytes < limit]
                if not len(open_):
                    break
                found = sorted([*found, *self._lacking(rows.keep(open_))], key=lambda near: near.lacking_bytes)
                found = found[:_NEAREST]
        return tuple(found)

    def _lacking(self, rows: Rows) -> list[Nearest]:
        """Of the rows nearest to fitting the layouts that are nearest."""
        block = rows.block()
        memory = MemoryModel(self.setting, block)
        allowed = memory.fits_host(self.host_limit_bytes) & (first_violations(self.setting, block, CHOICE_RULES) < 0)
        lacking = np.where(np.broadcast_to(allowed, block.shape), memory.peak_bytes() - self.limit_bytes, np.inf)
        each = lacking.reshape(len(rows.columns), -1)
        at, least = each.argmin(axis=1), each.min(axis=1)
        nearest = [row for row in np.argsort(least)[:_NEAREST].tolist() if np.isfinite(least[row])]
        return [
            Nearest(layout=block.one(row * each.shape[1] + int(at[row])), lacking_bytes=float(least[row]))
            for row in nearest
        ]


def _first(block: Layouts, which: np.ndarray) -> Layout:
    """The first layout of a block that a mask names."""
    return block.one(int(np.argmax(np.broadcast_to(which, block.shape))))


def search(
    setting: Setting,
    bounds: Bounds,
    *,
    margin_bytes: float = 0.0,
    kept: int = KEPT,
    progress: Callable[[int, int], None] = lambda _done, _fit: None,
) -> SearchResult:
    """Decide every layout of the space and rank those that fit."""
    started = time.perf_counter()
    run = _Search(
        space=Space(setting=setting, bounds=bounds),
        margin_bytes=margin_bytes,
        best=Best(count=kept),
        front=Front(usable_bytes=float(usable_bytes(setting))),
        progress=progress,
    )
    run.run()
    return SearchResult(
        best=run.best.found,
        front=run.front.sorted_points(),
        nearest=() if run.feasible else run.nearest(),
        layouts=run.layouts,
        layer_choices=run.layer_choices,
        timed=run.timed,
        feasible=run.feasible,
        rejected={code: count for code, count in run.rejected.most_common() if count},
        examples=run.examples,
        evaluate_s=time.perf_counter() - started,
    )
