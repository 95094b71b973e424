"""Seconds of one step: compute, exposed communication, pipeline bubble, optimizer, host gaps.

Times are of one rank and add up: what hides under something else is counted once, as the longer of the two, plus what
overlapping costs the compute beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from cost_models.data_traffic import DataTraffic
from cost_models.groups import CollectiveClock, Groups
from cost_models.parameters import telling_stages
from cost_models.part_cost import DIMENSIONS, PartCosts
from cost_models.pipeline import bubble_s
from cost_models.schedules import ZB_V, ZERO_BUBBLE
from cost_models.stage_activations import boundary_bytes
from cost_models.stage_memory import StageMemory, first_with
from cost_models.stage_parts import ModelParts
from cost_models.stage_time import StageTime, StageTimer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cost_models.layout import Column, Layouts
    from cost_models.setting import Setting

_PHASES = ("forward_s", "input_grad_s", "weight_grad_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What follows the pipeline once a step, on one rank; `hidden_s` ran beside compute and cost it `slowed_s`."""

    gradients_s: Column
    parameters_s: Column
    hidden_s: Column
    slowed_s: Column
    update_s: Column
    swap_s: Column

    @property
    def total_s(self) -> Column:
        """All of it; the swap, which varies with most, comes last."""
        return (self.gradients_s + self.parameters_s + (self.update_s + self.slowed_s)) + self.swap_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """Seconds of a step and where they go, on the slowest rank.

    Attributes:
        step_s: the whole step; the components sum to it.
        computing_s: kernels, recomputation included, and the optimizer's update.
        recompute_s, optimizer_s: of computing_s.
        communication_s: exposed communication by dimension (tp, cp, ep, dp, pp).
        hidden_communication_s: communication under compute.
        bubble_s: waiting in the pipeline.
        free_s: the device waits for the host: dispatch, swap, fixed overhead.
        hardware_flops: FLOPs a device computes in a step, recomputation included, the mean over pipeline ranks.
    """

    step_s: Column
    computing_s: Column
    recompute_s: Column
    optimizer_s: Column
    communication_s: dict[str, Column]
    hidden_communication_s: Column
    bubble_s: Column
    free_s: Column
    hardware_flops: Column


class StepTimeModel:
    """Step time of layouts under one setting."""

    def __init__(self, setting: Setting, layouts: Layouts) -> None:
        self._s = setting
        self._x = layouts
        self._fit = setting.calibration
        self._groups = Groups.of(layouts)
        self._clock = CollectiveClock(setting.cluster, setting.algorithm, setting.n_devices)
        self._parts = PartCosts(setting, layouts, self._groups, self._clock)
        self._traffic = DataTraffic(setting, layouts, self._groups, self._clock)
        self._timer = StageTimer(setting, layouts, self._parts, self._traffic)
        parts = ModelParts(setting, layouts)
        self._held = tuple(
            StageMemory(setting, layouts, parts, stage) for stage in telling_stages(setting.model, layouts)
        )

    def step_s(self) -> Column:
        """Seconds of a step alone: what a search ranks by."""
        return self._evaluated().step_s

    def least_step_s(self) -> Column:
        """A time that no choice of ZeRO, recomputation or swap on these rows stays under: each only adds to it."""
        times = tuple(self._timer.time(held) for held in self._held)
        own, common = self._fills_s(times)
        works = (self._work_s(h, t) + fill for h, t, fill in zip(self._held, times, own, strict=True))
        longest = reduce(np.maximum, works)
        return longest + common + self._fit.step_overhead_s

    def estimate(self) -> TimeEstimate:
        """Step time and where it goes."""
        run, m, slow = self._evaluated(), self._x.accumulation, self._fit.overlap_slowdown
        pick, times = _Picker(first_with(run.longest_s, run.ends_s)), run.times
        tail = Tail(**{field.name: pick([getattr(t, field.name) for t in run.tails]) for field in fields(Tail)})
        comm = {name: m * pick([t.comm_s[name] for t in times]) for name in DIMENSIONS}
        waited = m * pick([t.gather.forward_s + t.gather.backward_s for t in times])
        comm["dp"] = waited + tail.gradients_s + tail.parameters_s + run.norm_s
        # What the pipeline waits for its links, apart from what it would wait if they took no time.
        fill, dry = (pick(list(own)) + common for own, common in (run.fills_s, self._fills_s(times, linked=False)))
        bubble = np.minimum(dry, fill)
        comm["pp"] = fill - bubble
        computing = m * pick([t.compute_s + slow * t.gather.hidden_s for t in times]) + tail.update_s + tail.slowed_s
        host = m * pick([t.dispatch_s + t.offload_s for t in times]) + tail.swap_s + self._fit.step_overhead_s
        return TimeEstimate(
            step_s=run.step_s,
            computing_s=computing,
            recompute_s=m * pick([t.recompute_s for t in times]),
            optimizer_s=tail.update_s,
            communication_s=comm,
            hidden_communication_s=m * pick([t.hidden_s + t.gather.hidden_s for t in times]) + tail.hidden_s,
            bubble_s=bubble,
            free_s=host,
            hardware_flops=m * self._parts.flops() / self._x.pp,
        )

    def _evaluated(self) -> _Run:
        """The telling ranks, each with its work and what follows it; the step ends with the last of them."""
        times = tuple(self._timer.time(held) for held in self._held)
        tails = tuple(self._tail(held, time) for held, time in zip(self._held, times, strict=True))
        own, common = self._fills_s(times)
        ends = [
            self._work_s(held, time) + fill + tail.total_s
            for held, time, fill, tail in zip(self._held, times, own, tails, strict=True)
        ]
        longest = reduce(np.maximum, ends)
        norm = self._clock.seconds("all_reduce", self._groups.world, np.asarray(4.0))
        return _Run(
            times=times,
            tails=tails,
            ends_s=ends,
            longest_s=longest,
            fills_s=(own, common),
            norm_s=norm,
            step_s=longest + (common + (norm + self._fit.step_overhead_s)),
        )

    def _work_s(self, held: StageMemory, time: StageTime) -> Column:
        """Seconds of all micro batches on one rank; less than nothing where the layout has no such rank."""
        return np.where(held.stage.exists, self._x.accumulation, -np.inf) * time.total_s

    def _tail(self, held: StageMemory, time: StageTime) -> Tail:
        gradients, gradients_hidden = self._traffic.gradients_s(held, time.input_grad_s + time.weight_grad_s)
        parameters, parameters_hidden = self._traffic.parameters_s(held, time.forward_s)
        update, swap = self._update(held)
        hidden = gradients_hidden + parameters_hidden
        return Tail(
            gradients_s=gradients,
            parameters_s=parameters,
            hidden_s=hidden,
            slowed_s=self._fit.overlap_slowdown * hidden,
            update_s=update,
            swap_s=swap,
        )

    def _update(self, held: StageMemory) -> tuple[Column, Column]:
        """The optimizer's update on the shard, and what swapping its state in and out takes beyond that."""
        numbers = self._s.workload.numbers
        elements = held.states.sharded_parameters
        update = self._parts.compute.optimizer_s(elements)
        each = self._s.workload.optimizer_state_bytes + numbers.main_weight_bytes
        host = self._s.cluster.device.host_bandwidth_bytes_per_s
        # In and out run at once on a full-duplex link; the state passes once each way.
        moved = elements * each / host if host else np.full_like(elements, np.inf)
        return update, np.where(self._x.swap_optimizer == 1, np.maximum(moved - update, 0.0), 0.0)

    def _fills_s(self, times: tuple[StageTime, ...], *, linked: bool = True) -> tuple[tuple[Column, ...], Column]:
        """Seconds that a rank waits while a micro batch fills or drains the pipeline: each rank's own, and all ranks'.

        A micro batch passes every rank once, so the fill takes the mean of the ranks' times. Not so where backward is
        split: weight gradients there fill what others leave idle, and only a rank's own times say how much. Taken
        apart from its work, such a fill could grow by more than the work shrinks when something gets faster.

        Args:
            linked: sends between ranks take the time of their links; without it, none.
        """
        x = self._x
        split = (x.schedule == ZERO_BUBBLE) | (x.schedule == ZB_V)
        weights = [np.where(held.stage.exists, held.stage.count, 0) / x.pp for held in self._held]
        p2p = self._clock.seconds("send_recv", self._groups.pp, boundary_bytes(self._s, x))
        link = np.where(x.pp > 1, p2p, 0.0) * linked

        def mean(seconds: Iterable[Column]) -> Column:
            return reduce(np.add, (weight * each for weight, each in zip(weights, seconds, strict=True)))

        def fill(forward_s: Column, input_grad_s: Column, weight_grad_s: Column) -> Column:
            return bubble_s(x.schedule, x.pp, x.vpp, x.accumulation, forward_s, input_grad_s, weight_grad_s, link)

        own = tuple(
            np.where(split, fill(t.forward_s, t.input_grad_s, t.weight_grad_s), 0.0) if split.any() else np.asarray(0.0)
            for t in times
        )
        if split.all():
            return own, np.asarray(0.0)
        shared = fill(*(mean(getattr(t, name) for t in times) for name in _PHASES))
        return own, np.where(split, 0.0, shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    times: tuple[StageTime, ...]
    tails: tuple[Tail, ...]
    ends_s: list[Column]
    longest_s: Column
    fills_s: tuple[tuple[Column, ...], Column]
    norm_s: Column
    step_s: Column


@dataclass(frozen=True, slots=True)
class _Picker:
    """Takes from the telling stages the value of the one that `index` names."""

    index: Column

    def __call__(self, options: list[Column]) -> Column:
        taken = options[-1]
        for i in reversed(range(len(options) - 1)):
            taken = np.where(self.index == i, options[i], taken)
        return taken
