"""Peak device memory of the worst pipeline rank, by category, and the host memory that swapping takes.

A category says what the bytes are, a moment says what is alive together. Two moments can be the peak: the first
backward after the warm-up, with most micro batches in flight, and the optimizer step, with no activations but with the
slices of a swapped optimizer. Weights, gradients and moments follow Rajbhandari et al. 2020 (arXiv:1910.02054,
section 3); activations in flight follow Narayanan et al. 2021 (arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING

import numpy as np

from cost_models.parameters import expert_shard_degree, telling_stages
from cost_models.schedules import NONE, SCHEDULES, ZB_V, ZERO_BUBBLE
from cost_models.stage_memory import StageMemory, first_with
from cost_models.stage_parts import ModelParts

if TYPE_CHECKING:
    from cost_models.layout import Column, Layouts
    from cost_models.setting import Setting

CATEGORIES = (
    "weights",
    "gradients",
    "main_weights",
    "optimizer",
    "activations",
    "transient",
    "pipeline_buffers",
    "communication",
    "reserve",
)

# Layouts whose moments are formed together, few enough to stay in cache.
_PART = 10_000
# No pipeline, one whose backwards are whole, one that splits them.
_KIND = np.array([{NONE: 0, ZERO_BUBBLE: 2, ZB_V: 2}.get(code, 1) for code in range(len(SCHEDULES))])


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the worst rank.

    Attributes:
        peak_bytes: all categories together, shape of the layouts.
        allocated_bytes: what torch's allocator would call its peak: all but communication buffers and reserve.
        stages: per telling stage the bytes by category, as columns that broadcast.
        worst: index of the telling stage with the peak.
        worst_rank: its pipeline rank.
        host_bytes: swapped and offloaded bytes a device.
    """

    peak_bytes: Column
    allocated_bytes: Column
    stages: tuple[dict[str, Column], ...]
    worst: Column
    worst_rank: Column
    host_bytes: Column

    def by_category(self) -> dict[str, Column]:
        """Bytes of each category on the worst rank; they sum to peak_bytes."""
        shape = self.peak_bytes.shape
        return {
            name: np.choose(self.worst, [np.broadcast_to(stage[name], shape) for stage in self.stages])
            for name in CATEGORIES
        }


class MemoryModel:
    """Memory of layouts under one setting."""

    def __init__(self, setting: Setting, layouts: Layouts) -> None:
        self._s = setting
        self._x = layouts
        parts = ModelParts(setting, layouts)
        self.stages = tuple(
            StageMemory(setting, layouts, parts, stage) for stage in telling_stages(setting.model, layouts)
        )

    def estimate(self) -> MemoryEstimate:
        """Evaluate the telling stages and take the worst."""
        peaks = np.broadcast_arrays(*(stage.tensors for stage in self.stages))
        highest = reduce(np.maximum, peaks)
        worst = first_with(highest, peaks)
        ranks = [np.broadcast_to(stage.stage.rank, worst.shape) for stage in self.stages]
        return MemoryEstimate(
            peak_bytes=self._on_device(highest),
            allocated_bytes=highest,
            stages=tuple(self._categories(stage) for stage in self.stages),
            worst=worst,
            worst_rank=np.choose(worst, ranks),
            host_bytes=reduce(np.maximum, (stage.swapped + stage.offloaded for stage in self.stages)),
        )

    def peak_bytes(self) -> Column:
        """The peak on the device alone."""
        return self._on_device(reduce(np.maximum, (stage.tensors for stage in self.stages)))

    def fits(self, limit_bytes: float, among: Column | None = None) -> Column:
        """Whether the peak stays within a limit.

        Bounds decide most layouts without forming the peak; all moments are formed for the others alone.

        Args:
            among: the layouts that are asked for, in a shape that broadcasts; of others the answer may be wrong.
        """
        room = [
            (limit_bytes - self._fixed) / (1.0 + self._s.calibration.fragmentation) - stage.static
            for stage in self.stages
        ]
        may: Column = reduce(
            np.logical_and, (s.bounds.least <= left for s, left in zip(self.stages, room, strict=True))
        )
        may = may & reduce(np.logical_and, (s.update_bytes <= left for s, left in zip(self.stages, room, strict=True)))
        does = reduce(np.logical_and, (s.bounds.most <= left for s, left in zip(self.stages, room, strict=True)))
        unsure = may & ~does if among is None else may & ~does & among
        if not np.any(unsure):
            return may
        highest = self._highest(np.broadcast_to(unsure, self._x.shape))
        fits = [np.asarray(h <= left) for h, left in zip(highest, room, strict=True)]
        return np.asarray(np.where(unsure, may & reduce(np.logical_and, fits), may))

    def _highest(self, wanted: Column) -> list[Column]:
        """The fullest moment of each stage, right where it is wanted.

        Neither placement nor a swapped optimizer makes a difference to it, so both stand for one. Those of one kind of
        pipeline go together: they have fewer moments, or stages, than all have.
        """
        alike = {name: np.zeros((1,) * len(self._x.shape), dtype=np.int64) for name in ("swap_optimizer", "placement")}
        x = replace(self._x, **alike)
        axes = tuple(i for i, (n, whole) in enumerate(zip(x.shape, self._x.shape, strict=True)) if n < whole)
        which = np.flatnonzero(wanted.any(axis=axes, keepdims=True))
        layouts = x.take(which)
        found = [np.zeros(x.shape) for _ in self.stages]
        kind = _KIND[layouts.schedule]
        for code in np.unique(kind):
            same = np.flatnonzero(kind == code)
            for part in np.array_split(same, len(same) // _PART + 1):
                stages = MemoryModel(self._s, layouts.take(part)).stages
                for values, stage in zip(found, stages, strict=True):
                    if np.any(stage.stage.exists):
                        values.reshape(-1)[which[part]] = stage.highest
        return found

    def fits_host(self, limit_bytes: float) -> Column:
        """Whether what is swapped and offloaded stays within a limit, bytes a device."""
        if all(stage.offloaded.max() + stage.swapped.max() <= limit_bytes for stage in self.stages):
            return np.asarray(True)
        fine = [stage.offloaded <= limit_bytes - stage.swapped for stage in self.stages]
        return reduce(np.logical_and, fine)

    def least_peak_bytes(self) -> Column:
        """For each row of a search's block a peak that none of its layouts stays under."""
        axes = tuple(range(1, len(self._x.shape)))
        least = np.asarray(0.0)
        for stage in self.stages:
            least = np.maximum(least, stage.static.min(axis=axes) + stage.bounds.least.min(axis=axes))
        return least * (1.0 + self._s.calibration.fragmentation) + self._fixed.min(axis=axes)

    def least_peaks_bytes(self) -> Column:
        """A peak that each layout does not stay under."""
        return self._on_device(reduce(np.maximum, (stage.static + stage.bounds.least for stage in self.stages)))

    def _on_device(self, tensors: Column) -> Column:
        """Tensors with fragmentation, context and communication buffers; these are the same on every rank."""
        return tensors * (1.0 + self._s.calibration.fragmentation) + self._fixed

    @cached_property
    def _fixed(self) -> Column:
        return self._communication + self._s.cluster.device.context_bytes

    def _categories(self, stage: StageMemory) -> dict[str, Column]:
        parts = stage.categories()
        tensors = reduce(np.add, parts.values())
        parts["communication"] = self._communication
        parts["reserve"] = self._s.cluster.device.context_bytes + self._s.calibration.fragmentation * tensors
        return parts

    @cached_property
    def _communication(self) -> Column:
        """Buffers of the communicators that this layout opens; each takes its buffer for itself."""
        cluster, x = self._s.cluster, self._x
        opened = sum(np.asarray(group > 1, dtype=float) for group in communicator_sizes(self._s, x))
        pipeline = np.where(x.pp > 1, 1.0, 0.0)
        return opened * cluster.communicator_buffer_bytes + pipeline * cluster.p2p_buffer_bytes


def communicator_sizes(setting: Setting, layouts: Layouts) -> tuple[Column, ...]:
    """Sizes of a rank's groups: world, tp, cp, pp, gradient shards, their replicas; for experts ep and replicas."""
    x = layouts
    shard = np.where(x.zero > 0, x.dp_shard * x.cp, 1)
    groups = [x.tp * x.cp * x.pp * x.dp, x.tp, x.cp, x.pp, shard, x.dp * x.cp // shard]
    if setting.model.moe:
        # The replicas of a shard of experts are those of dense shards: one communicator serves both.
        alike = np.where(x.zero > 0, expert_shard_degree(x), x.tp * x.cp * x.dp // np.maximum(x.ep, 1))
        groups += [x.ep, np.where(x.ep > 1, alike, 1)]
    return tuple(groups)
