"""Seconds of one step: compute, exposed communication, pipeline bubble, optimizer, host gaps.

Times are of one rank and add up: what hides under something else is counted once, as the longer of the two, plus what
overlapping costs the compute beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from cost_models.compute import ComputeModel, PartTime
from cost_models.groups import CollectiveClock, Groups
from cost_models.memory import EVERY, FULL, SELECTIVE, MemoryModel, boundary_bytes
from cost_models.parameters import PartParameters, Stage, layers_per_virtual_stage, telling_stages
from cost_models.pipeline import step_span_s

if TYPE_CHECKING:
    from cost_models.layout import Column, Layouts
    from cost_models.operators import Operator
    from cost_models.setting import Setting

DIMENSIONS = ("tp", "cp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """One part of the model for one micro batch: compute, and the collectives that compute waits for.

    Attributes:
        compute: device time and FLOPs.
        forward_comm_s, backward_comm_s, redo_comm_s: exposed communication by dimension.
        hidden_comm_s: communication that ran beside compute.
    """

    compute: PartTime
    forward_comm_s: dict[str, Column]
    backward_comm_s: dict[str, Column]
    redo_comm_s: dict[str, Column]
    hidden_comm_s: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one micro batch on one pipeline rank; `backward` is both gradients, recomputation included."""

    forward_s: Column
    input_grad_s: Column
    weight_grad_s: Column
    computing_s: Column
    recompute_s: Column
    comm_s: dict[str, Column]
    hidden_comm_s: Column
    free_s: Column

    @property
    def total_s(self) -> Column:
        """One micro batch, forward and backward."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


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
        hardware_flops: FLOPs a device computes in a step, recomputation included.
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

    def __init__(self, setting: Setting, layouts: Layouts, algorithm: str = "auto") -> None:
        self._s = setting
        self._x = layouts
        self._fit = setting.calibration
        self._groups = Groups.of(layouts)
        self._clock = CollectiveClock(setting.cluster, algorithm)
        self._compute = ComputeModel(
            device=setting.cluster.device,
            calibration=setting.calibration,
            workload=setting.workload,
            stack=setting.stack,
        )
        table = setting.operator_table(layouts)
        self._dense = self._part(table.dense_layer())
        self._moe = self._part(table.moe_layer()) if setting.model.moe else None
        self._embedding, self._head = self._part(table.embedding()), self._part(table.head())
        self._params = PartParameters.of(setting.model, layouts)
        self._memory = MemoryModel(setting, layouts)

    def estimate(self) -> TimeEstimate:
        """Evaluate first, middle and last rank, span the pipeline, add what happens once a step."""
        x = self._x
        stages = telling_stages(self._s.model, x)
        times = [self._stage_time(stage) for stage in stages]
        span, work, slowest = self._span(stages, times)
        pick = _Picker(slowest)
        gradient_s, gradient_hidden_s = self._gradient_reduction(stages, times, pick)
        parameters_s, parameters_hidden_s = self._parameter_gather(stages, times, pick)
        update_s, swap_wait_s = self._update(stages, pick)
        norm_s = self._clock.seconds("all_reduce", self._groups.world, np.asarray(4.0))
        m = x.accumulation
        comm = {name: m * pick([t.comm_s[name] for t in times]) for name in times[0].comm_s}
        comm["dp"] = comm["dp"] + gradient_s + parameters_s + norm_s
        slow = self._fit.overlap_slowdown * (gradient_hidden_s + parameters_hidden_s)
        free = m * pick([t.free_s for t in times]) + swap_wait_s + self._fit.step_overhead_s
        computing = m * pick([t.computing_s for t in times]) + update_s + slow
        tail = gradient_s + parameters_s + norm_s + update_s + swap_wait_s + self._fit.step_overhead_s + slow
        return TimeEstimate(
            step_s=span + tail,
            computing_s=computing,
            recompute_s=m * pick([t.recompute_s for t in times]),
            optimizer_s=update_s,
            communication_s=comm,
            hidden_communication_s=m * pick([t.hidden_comm_s for t in times]) + gradient_hidden_s + parameters_hidden_s,
            bubble_s=np.maximum(span - work, 0.0),
            free_s=free,
            hardware_flops=m * pick([self._flops(stage) for stage in stages]),
        )

    def _part(self, operators: tuple[Operator, ...]) -> PartCost:
        compute = self._compute.part_time(operators)
        exposed: dict[str, dict[str, Column]] = {p: {} for p in ("forward", "backward", "redo")}
        hidden = np.asarray(0.0)
        for dimension in DIMENSIONS:
            for phase in ("forward", "backward"):
                ring, plain, skipped = self._collectives(operators, dimension, phase)
                cover = compute.attention_forward_s if phase == "forward" else compute.attention_backward_s
                beside = np.minimum(ring, cover)
                share = self._s.stack.tensor_overlap if dimension == "tp" else 0.0
                exposed[phase][dimension] = plain * (1 - share) + ring - beside
                if phase == "forward":
                    exposed["redo"][dimension] = (plain - skipped) * (1 - share) + ring - beside
                hidden = hidden + beside + plain * share
        return PartCost(
            compute=compute,
            forward_comm_s=exposed["forward"],
            backward_comm_s=exposed["backward"],
            redo_comm_s=exposed["redo"],
            hidden_comm_s=hidden,
        )

    def _collectives(
        self, operators: tuple[Operator, ...], dimension: str, phase: str
    ) -> tuple[Column, Column, Column]:
        """Seconds of ring exchange, of all other collectives, and of those that a recomputation leaves out."""
        axes = getattr(self._groups, dimension)
        ring = plain = skipped = np.asarray(0.0)
        for op in operators:
            for call in op.collectives:
                if call.dimension != dimension or call.phase != phase:
                    continue
                each = self._clock.seconds(call.kind, axes, call.n_bytes) * call.count
                if call.overlapped:
                    ring = ring + each
                    continue
                plain = plain + each
                if op.last and self._s.stack.recompute_to_last_saved:
                    skipped = skipped + each
        return ring, plain, skipped

    def _stage_time(self, stage: Stage) -> StageTime:
        parts = [(stage.dense_layers, self._dense, True), (stage.has_embedding, self._embedding, False)]
        parts += [(stage.moe_layers, self._moe, True)] if self._moe else []
        parts += [(stage.has_head, self._head, False)]
        redo_share = self._redo_share()
        forward = input_grad = weight_grad = computing = redone = hidden = free = np.asarray(0.0)
        comm: dict[str, Column] = dict.fromkeys((*DIMENSIONS, "dp", "pp"), np.asarray(0.0))
        for count, part, is_layer in parts:
            c = part.compute
            redo = self._redo(part, redo_share) if is_layer else _NO_REDO
            f_comm, b_comm = _sum(part.forward_comm_s), _sum(part.backward_comm_s) + _sum(redo.comm_s)
            f, i = c.forward_s + f_comm, c.input_grad_s + redo.seconds + b_comm
            f_free = np.maximum(c.forward_kernels * self._fit.dispatch_s - f, 0.0)
            kernels = c.backward_kernels + redo.kernels
            b_free = np.maximum(kernels * self._fit.dispatch_s - i - c.weight_grad_s, 0.0)
            slow = self._fit.overlap_slowdown * part.hidden_comm_s
            forward = forward + count * (f + f_free)
            input_grad = input_grad + count * (i + b_free + slow)
            weight_grad = weight_grad + count * c.weight_grad_s
            computing = computing + count * (c.forward_s + c.input_grad_s + c.weight_grad_s + redo.seconds + slow)
            redone = redone + count * redo.seconds
            hidden = hidden + count * part.hidden_comm_s
            free = free + count * (f_free + b_free)
            for name in DIMENSIONS:
                each = part.forward_comm_s[name] + part.backward_comm_s[name] + redo.comm_s.get(name, 0.0)
                comm[name] = comm[name] + count * each
        gather = self._zero3(stage, forward, input_grad + weight_grad)
        wait = self._offload_wait(stage, forward + input_grad + weight_grad)
        comm["dp"] = gather.forward_s + gather.backward_s
        slow = self._fit.overlap_slowdown * gather.hidden_s
        return StageTime(
            forward_s=forward + gather.forward_s + wait / 2,
            input_grad_s=input_grad + gather.backward_s + wait / 2 + slow,
            weight_grad_s=weight_grad,
            computing_s=computing + slow,
            recompute_s=redone,
            comm_s=comm,
            hidden_comm_s=hidden + gather.hidden_s,
            free_s=free + wait,
        )

    def _redo_share(self) -> Column:
        """Share of a stage's layers that full recomputation runs again."""
        x = self._x
        per_stage = layers_per_virtual_stage(self._s.model, x)
        some = np.minimum(x.recompute_layers / per_stage, 1.0)
        return np.where(x.recompute == FULL, np.where(x.recompute_layers > 0, some, 1.0), 0.0)

    def _redo(self, part: PartCost, share: Column) -> _Redo:
        selective = self._x.recompute == SELECTIVE
        c = part.compute
        return _Redo(
            seconds=share * c.full_s + np.where(selective, c.selective_s, 0.0),
            kernels=share * c.forward_kernels + np.where(selective, c.selective_kernels, 0.0),
            comm_s={name: share * seconds for name, seconds in part.redo_comm_s.items()},
        )

    def _zero3(self, stage: Stage, forward_s: Column, backward_s: Column) -> _Gather:
        """ZeRO-3 gathers each layer's weights before its forward and again before its backward, every micro batch.

        Reducing gradients after every micro batch adds its scatter, and for ZeRO-2 as well.
        """
        x, width = self._x, self._s.workload.numbers.weight_bytes
        layers = np.maximum(stage.layers, 1.0)
        dense = self._memory.dense_parameters(stage) / layers
        experts = self._memory.expert_parameters(stage) / layers
        gather = np.where(x.zero == 3, self._over_shards("all_gather", dense * width, experts * width), 0.0)
        many = (x.reduce_gradients == EVERY) & (x.accumulation > 1)
        scatter = np.where(many & (x.zero >= 2), self._reduction(dense, experts), 0.0)
        forward_wait, forward_hidden = self._behind(gather, forward_s / layers, self._s.stack.prefetches_weights)
        backward_wait, backward_hidden = self._behind(
            gather + scatter, backward_s / layers, self._s.stack.prefetches_weights
        )
        return _Gather(
            forward_s=layers * forward_wait,
            backward_s=layers * backward_wait,
            hidden_s=layers * (forward_hidden + backward_hidden),
        )

    def _behind(self, comm_s: Column, compute_s: Column, overlaps: bool) -> tuple[Column, Column]:
        """Exposed and hidden seconds of communication that may run beside compute."""
        hidden = np.minimum(comm_s, compute_s) if overlaps else np.zeros_like(comm_s)
        return comm_s - hidden, hidden

    def _over_shards(self, kind: str, dense_bytes: Column, expert_bytes: Column) -> Column:
        g = self._groups
        seconds = self._clock.seconds(kind, g.shard, dense_bytes)
        return seconds + self._clock.seconds(kind, g.expert_shard, expert_bytes) if self._moe else seconds

    def _reduction(self, dense: Column, experts: Column) -> Column:
        """Gradients of these elements: scatter over shards, all-reduce of the shard over replicas."""
        size = self._s.stack.gradient_bytes if self._s.workload.numbers.main_weight_bytes else 4
        g, x = self._groups, self._x
        whole = self._clock.seconds("all_reduce", g.data, dense * size)
        shards = np.where(x.zero > 0, x.dp_shard * x.cp, 1)
        split = self._clock.seconds("reduce_scatter", g.shard, dense * size)
        split = split + self._clock.seconds("all_reduce", g.replica, dense * size / shards)
        total = np.where(x.zero > 0, split, whole)
        if self._moe is None:
            return total
        spread = reduce(np.multiply, (axis[0] for axis in g.expert_shard))
        total = total + self._clock.seconds("reduce_scatter", g.expert_shard, experts * size)
        return total + self._clock.seconds("all_reduce", g.expert_replica, experts * size / spread)

    def _gradient_reduction(
        self, stages: tuple[Stage, ...], times: list[StageTime], pick: _Picker
    ) -> tuple[Column, Column]:
        """Once a step, under the backward of the last micro batch; the last layer's bucket cannot hide."""
        x = self._x
        many = (x.reduce_gradients == EVERY) & (x.accumulation > 1) & (x.zero >= 2)
        exposed, hidden = [], []
        for stage, time in zip(stages, times, strict=True):
            seconds = self._reduction(self._memory.dense_parameters(stage), self._memory.expert_parameters(stage))
            seconds = np.where(many, 0.0, seconds)
            layers = np.maximum(stage.layers, 1.0)
            room = (time.input_grad_s + time.weight_grad_s) * (1 - 1 / layers)
            waits, hides = self._behind(seconds, room, self._s.stack.overlaps_gradients)
            last = np.where(np.asarray(self._s.stack.overlaps_gradients), seconds / layers, 0.0)
            exposed.append(np.maximum(waits, last))
            hidden.append(np.minimum(hides, seconds - exposed[-1]))
        return pick(exposed), pick(hidden)

    def _parameter_gather(
        self, stages: tuple[Stage, ...], times: list[StageTime], pick: _Picker
    ) -> tuple[Column, Column]:
        """ZeRO-1 and 2 gather the updated weights once a step, layer by layer before the first forward."""
        width = self._s.workload.numbers.weight_bytes
        once = (self._x.zero == 1) | (self._x.zero == 2)
        exposed, hidden = [], []
        for stage, time in zip(stages, times, strict=True):
            dense, experts = self._memory.dense_parameters(stage), self._memory.expert_parameters(stage)
            seconds = np.where(once, self._over_shards("all_gather", dense * width, experts * width), 0.0)
            layers = np.maximum(stage.layers, 1.0)
            waits, hides = self._behind(seconds, time.forward_s * (1 - 1 / layers), self._s.stack.overlaps_parameters)
            first = np.where(np.asarray(self._s.stack.overlaps_parameters), seconds / layers, 0.0)
            exposed.append(np.maximum(waits, first))
            hidden.append(np.minimum(hides, seconds - exposed[-1]))
        return pick(exposed), pick(hidden)

    def _update(self, stages: tuple[Stage, ...], pick: _Picker) -> tuple[Column, Column]:
        """The optimizer's update on the shard, and what swapping its state in and out takes beyond that."""
        numbers = self._s.workload.numbers
        elements = pick([self._memory.sharded_parameters(stage) for stage in stages])
        update = self._compute.optimizer_s(elements)
        each = self._s.workload.optimizer_state_bytes + numbers.main_weight_bytes
        host = self._s.cluster.device.host_bandwidth_bytes_per_s
        # In and out run at once on a full-duplex link; the state passes once each way.
        moved = elements * each / host if host else np.full_like(elements, np.inf)
        return update, np.where(self._x.swap_optimizer == 1, np.maximum(moved - update, 0.0), 0.0)

    def _offload_wait(self, stage: Stage, work_s: Column) -> Column:
        """Activations go out under forward and come back under backward; what exceeds the work is waited for."""
        host = self._s.cluster.device.host_bandwidth_bytes_per_s
        moved = stage.layers * self._memory.kept_per_layer(stage) * 2
        wait = np.maximum(moved / host - work_s, 0.0) if host else np.full_like(moved, np.inf)
        return np.where(self._x.activation_offload == 1, wait, 0.0)

    def _span(self, stages: tuple[Stage, ...], times: list[StageTime]) -> tuple[Column, Column, Column]:
        """Seconds of all micro batches through the pipeline, the slowest rank's own work, and which rank that is."""
        x = self._x
        totals = [np.where(s.exists, t.total_s, 0.0) for s, t in zip(stages, times, strict=True)]
        slowest_s = reduce(np.maximum, totals)
        slowest = np.where(totals[0] == slowest_s, 0, np.where(totals[1] == slowest_s, 1, 2))
        pick = _Picker(slowest)
        p2p = self._clock.seconds("send_recv", self._groups.pp, boundary_bytes(self._s, x))
        equal = step_span_s(
            x.schedule,
            x.pp,
            x.vpp,
            x.accumulation,
            pick([t.forward_s for t in times]),
            pick([t.input_grad_s for t in times]),
            pick([t.weight_grad_s for t in times]),
            np.where(x.pp > 1, p2p, 0.0),
        )
        work = x.accumulation * slowest_s
        # A micro batch that fills or drains the pipeline passes every rank once, not the slowest pp times.
        mean = (totals[0] + totals[2] + np.maximum(x.pp - 2, 0) * totals[1]) / x.pp
        fill = (equal - work) * mean / np.maximum(slowest_s, 1e-30)
        return work + fill, work, slowest

    def _flops(self, stage: Stage) -> Column:
        """FLOPs of one micro batch, recomputation included."""
        share = self._redo_share()
        d = self._dense.compute
        total = stage.dense_layers * (d.forward_flops + d.backward_flops + share * d.full_flops)
        if self._moe:
            c = self._moe.compute
            total = total + stage.moe_layers * (c.forward_flops + c.backward_flops + share * c.full_flops)
        h = self._head.compute
        return total + stage.has_head * (h.forward_flops + h.backward_flops)


@dataclass(frozen=True, slots=True)
class _Redo:
    seconds: Column
    kernels: Column | float
    comm_s: dict[str, Column]


_NO_REDO = _Redo(np.asarray(0.0), 0.0, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gather:
    forward_s: Column
    backward_s: Column
    hidden_s: Column


@dataclass(frozen=True, slots=True)
class _Picker:
    """Takes from first, middle and last the value of the rank that `index` names."""

    index: Column

    def __call__(self, options: list[Column]) -> Column:
        return np.where(self.index == 0, options[0], np.where(self.index == 1, options[1], options[2]))


def _sum(by_dimension: dict[str, Column]) -> Column:
    return reduce(np.add, by_dimension.values(), np.asarray(0.0))
