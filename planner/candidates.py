"""Fitting layouts with what they are ranked by, and the two selections that a search keeps: the best, and the front."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cost_models.layout import Layout, Layouts

# Step times that differ by less than this share are one: the simpler layout then wins.
TIE = 1e-6
# Levels of headroom, as shares of the device's memory, at which the front between step time and headroom is read.
FRONT_LEVELS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Layouts as one-dimensional columns, with their step time and the peak memory."""

    layouts: Layouts
    step_s: np.ndarray
    peak_bytes: np.ndarray

    def take(self, which: np.ndarray) -> Candidates:
        """Some of them."""
        return Candidates(
            layouts=self.layouts.take(which), step_s=self.step_s[which], peak_bytes=self.peak_bytes[which]
        )

    def best(self, count: int) -> Candidates:
        """The first `count` in rank order."""
        return self.take(rank_order(self.layouts, self.step_s)[:count])

    @staticmethod
    def joined(parts: list[Candidates]) -> Candidates:
        """Several sets as one."""
        return Candidates(
            layouts=Layouts.joined([part.layouts for part in parts]),
            step_s=np.concatenate([part.step_s for part in parts]),
            peak_bytes=np.concatenate([part.peak_bytes for part in parts]),
        )


def complexity(layouts: Layouts) -> np.ndarray:
    """How much machinery a layout uses: ties go to fewer dimensions and less recomputation."""
    x = layouts
    dimensions = sum((np.asarray(column > 1).astype(np.int64) for column in (x.tp, x.cp, x.ep, x.pp, x.vpp)), 0)
    switches = x.swap_optimizer + x.activation_offload + x.reduce_gradients + x.placement
    in_part = (x.zero > 0) & (x.dp_shard != x.dp)
    return 8 * (dimensions + switches) + 2 * x.recompute + (x.recompute_layers > 0) + x.zero + in_part


def rank_order(layouts: Layouts, step_s: np.ndarray) -> np.ndarray:
    """Indices from best to worst: step time up to `TIE`, then complexity, then the columns: no two layouts tie."""
    coarse = np.round(np.log(step_s) / TIE)
    x = layouts
    rest = (
        x.recompute_layers, x.reduce_gradients, x.activation_offload, x.swap_optimizer, x.recompute, x.dp_shard, x.zero,
        x.placement, x.cp_kind, x.schedule, x.vpp, x.micro_batch, x.ep, x.cp, x.pp, x.tp, -x.sp,
    )  # fmt: skip
    return np.lexsort((*rest, complexity(layouts), coarse))


@dataclass(slots=True)
class Best:
    """The best layouts so far; `limit_s` is the time beyond which nothing can enter any more."""

    count: int
    found: Candidates | None = None
    limit_s: float = float("inf")

    def offer(self, block: Layouts, step_s: np.ndarray, peak_bytes: np.ndarray) -> None:
        """Take in what is good enough of a block; a time of infinity means: does not fit."""
        step, peak = step_s.reshape(-1), peak_bytes.reshape(-1)
        near = np.flatnonzero((step <= self.limit_s) & (step < np.inf))
        if len(near) > self.count:
            limit = np.partition(step[near], self.count - 1)[self.count - 1]
            near = near[step[near] <= limit * (1 + 2 * TIE)]
        if not len(near):
            return
        new = Candidates(layouts=block.take(near), step_s=step[near], peak_bytes=peak[near])
        self.found = Candidates.joined([self.found, new] if self.found else [new]).best(self.count)
        if len(self.found.step_s) == self.count:
            self.limit_s = float(self.found.step_s[-1]) * (1 + 2 * TIE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """The fastest layout at a level of headroom."""

    layout: Layout
    step_s: float
    headroom_bytes: float


@dataclass(slots=True)
class Front:
    """Step time against headroom: at each level the fastest layout with at least that much room."""

    usable_bytes: float
    points: dict[int, FrontPoint] = field(default_factory=dict)
    step_s: np.ndarray = field(default_factory=lambda: np.full(FRONT_LEVELS, np.inf))

    def level(self, headroom_bytes: np.ndarray) -> np.ndarray:
        """The level that a headroom falls to."""
        return np.clip(headroom_bytes * (FRONT_LEVELS / self.usable_bytes), 0, FRONT_LEVELS - 1).astype(np.int64)

    def offer(self, block: Layouts, step_s: np.ndarray, peak_bytes: np.ndarray) -> None:
        """Take in what beats the fastest so far at its level: soon next to nothing."""
        step, headroom = step_s.reshape(-1), self.usable_bytes - peak_bytes.reshape(-1)
        level = self.level(headroom)
        beats = np.flatnonzero(step < self.step_s[level])
        for index in np.unique(level[beats]).tolist():
            here = beats[level[beats] == index]
            at = int(here[np.argmin(step[here])])
            self.points[index] = FrontPoint(
                layout=block.one(at), step_s=float(step[at]), headroom_bytes=float(headroom[at])
            )
            self.step_s[index] = step[at]
        # What is faster with more room is better at every lower level too.
        self.step_s = np.minimum.accumulate(self.step_s[::-1])[::-1]

    def sorted_points(self) -> tuple[FrontPoint, ...]:
        """Points that no other beats in both time and room, fastest first."""
        kept: list[FrontPoint] = []
        for index in sorted(self.points, reverse=True):
            point = self.points[index]
            if not kept or point.step_s < kept[-1].step_s:
                kept.append(point)
        return tuple(reversed(kept))
