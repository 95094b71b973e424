"""Seconds of one step: compute, exposed communication, pipeline bubble, optimizer, host gaps.

Times are of one rank and add up: what hides under something else is counted once, as the longer of the two, plus what
overlapping costs the compute beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from cost_models.compute import ComputeModel, PartTime
from cost_models.groups import CollectiveClock, Groups
from cost_models.parameters import PartParameters, Stage, layers_per_virtual_stage, telling_stages
from cost_models.pipeline import bubble_s
from cost_models.stage_memory import EVERY, FULL, SELECTIVE, ModelParts, StageMemory, boundary_bytes, first_with

if TYPE_CHECKING:
    from collections.abc import Iterable

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
class Gather:
    """ZeRO traffic of one micro batch on one rank: waited for in forward and backward, and hidden under compute."""

    forward_s: Column
    backward_s: Column
    hidden_s: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one micro batch on one pipeline rank.

    Attributes:
        forward_s, input_grad_s, weight_grad_s: with everything that the rank waits for; recomputation is in the second.
        compute_s: kernels, recomputation included.
        recompute_s: of compute_s.
        comm_s: exposed communication of tp, cp, ep.
        hidden_s: communication of tp, cp, ep under compute.
        dispatch_s: the device waits for the host to issue kernels.
        gather: ZeRO traffic.
        offload_s: waiting for activations on their way to or from the host.
    """

    forward_s: Column
    input_grad_s: Column
    weight_grad_s: Column
    compute_s: Column
    recompute_s: Column
    comm_s: dict[str, Column]
    hidden_s: Column
    dispatch_s: Column
    gather: Gather
    offload_s: Column

    @property
    def total_s(self) -> Column:
        """One micro batch, forward and backward."""
        return self.forward_s + (self.input_grad_s + self.weight_grad_s)


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

    def __init__(self, setting: Setting, layouts: Layouts, algorithm: str = "auto") -> None:
        self._s = setting
        self._x = layouts
        self._fit = setting.calibration
        self._groups = Groups.of(layouts)
        self._clock = CollectiveClock(setting.cluster, algorithm, setting.n_devices)
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
        self._stages = telling_stages(setting.model, layouts)
        parts = ModelParts(setting, layouts)
        self._held = {id(stage): StageMemory(setting, layouts, parts, stage) for stage in self._stages}

    def step_s(self) -> Column:
        """Seconds of a step alone: what a search ranks by."""
        return self._evaluated().step_s

    def least_step_s(self) -> Column:
        """A time that no choice of ZeRO, recomputation or swap on these rows stays under: each only adds to it."""
        times = tuple(self._stage_time(stage) for stage in self._stages)
        longest = reduce(np.maximum, (self._work_s(s, t) for s, t in zip(self._stages, times, strict=True)))
        return longest + self._fill_s(times) + self._fit.step_overhead_s

    def estimate(self) -> TimeEstimate:
        """Step time and where it goes."""
        run, m, slow = self._evaluated(), self._x.accumulation, self._fit.overlap_slowdown
        pick, times = _Picker(first_with(run.longest_s, run.ends_s)), run.times
        tail = Tail(**{field.name: pick([getattr(t, field.name) for t in run.tails]) for field in fields(Tail)})
        comm = {name: m * pick([t.comm_s[name] for t in times]) for name in DIMENSIONS}
        waited = m * pick([t.gather.forward_s + t.gather.backward_s for t in times])
        comm["dp"] = waited + tail.gradients_s + tail.parameters_s + run.norm_s
        comm["pp"] = np.zeros_like(run.longest_s)
        computing = m * pick([t.compute_s + slow * t.gather.hidden_s for t in times]) + tail.update_s + tail.slowed_s
        host = m * pick([t.dispatch_s + t.offload_s for t in times]) + tail.swap_s + self._fit.step_overhead_s
        return TimeEstimate(
            step_s=run.step_s,
            computing_s=computing,
            recompute_s=m * pick([t.recompute_s for t in times]),
            optimizer_s=tail.update_s,
            communication_s=comm,
            hidden_communication_s=m * pick([t.hidden_s + t.gather.hidden_s for t in times]) + tail.hidden_s,
            bubble_s=run.fill_s,
            free_s=host,
            hardware_flops=m * self._flops() / self._x.pp,
        )

    def _evaluated(self) -> _Run:
        """The telling ranks, each with its work and what follows it; the step ends with the last of them."""
        times = tuple(self._stage_time(stage) for stage in self._stages)
        tails = tuple(self._tail(stage, time) for stage, time in zip(self._stages, times, strict=True))
        ends = [
            self._work_s(stage, time) + tail.total_s
            for stage, time, tail in zip(self._stages, times, tails, strict=True)
        ]
        longest, fill = reduce(np.maximum, ends), self._fill_s(times)
        norm = self._clock.seconds("all_reduce", self._groups.world, np.asarray(4.0))
        return _Run(
            times=times,
            tails=tails,
            ends_s=ends,
            longest_s=longest,
            fill_s=fill,
            norm_s=norm,
            step_s=longest + (fill + (norm + self._fit.step_overhead_s)),
        )

    def _work_s(self, stage: Stage, time: StageTime) -> Column:
        """Seconds of all micro batches on one rank; less than nothing where the layout has no such rank."""
        return np.where(stage.exists, self._x.accumulation, -np.inf) * time.total_s

    def _tail(self, stage: Stage, time: StageTime) -> Tail:
        gradients, gradients_hidden = self._gradient_reduction(stage, time)
        parameters, parameters_hidden = self._parameter_gather(stage, time)
        update, swap = self._update(stage)
        hidden = gradients_hidden + parameters_hidden
        return Tail(
            gradients_s=gradients,
            parameters_s=parameters,
            hidden_s=hidden,
            slowed_s=self._fit.overlap_slowdown * hidden,
            update_s=update,
            swap_s=swap,
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
        comm: dict[str, Column] = dict.fromkeys(DIMENSIONS, np.asarray(0.0))
        for count, part, is_layer in parts:
            c = part.compute
            redo = self._redo(part, redo_share) if is_layer else _NO_REDO
            f_comm, b_comm = _sum(part.forward_comm_s), _sum(part.backward_comm_s) + _sum(redo.comm_s)
            f, i = c.forward_s + f_comm, c.input_grad_s + redo.seconds + b_comm
            f_free = np.maximum(c.forward_kernels * self._fit.dispatch_s - f, 0.0)
            kernels = c.backward_kernels + redo.kernels
            slow = self._fit.overlap_slowdown * part.hidden_comm_s
            b_free = np.maximum(kernels * self._fit.dispatch_s - (i + slow) - c.weight_grad_s, 0.0)
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
        slow = self._fit.overlap_slowdown * gather.hidden_s
        forward, input_grad = forward + gather.forward_s, input_grad + (gather.backward_s + slow)
        out_wait = self._offload_wait(stage, forward)
        in_wait = self._offload_wait(stage, input_grad + weight_grad)
        return StageTime(
            forward_s=forward + out_wait,
            input_grad_s=input_grad + in_wait,
            weight_grad_s=weight_grad,
            compute_s=computing,
            recompute_s=redone,
            comm_s=comm,
            hidden_s=hidden,
            dispatch_s=free,
            gather=gather,
            offload_s=out_wait + in_wait,
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

    def _zero3(self, stage: Stage, forward_s: Column, backward_s: Column) -> Gather:
        """ZeRO-3 gathers each layer's weights before its forward and again before its backward, every micro batch.

        Reducing gradients after every micro batch adds its scatter, and for ZeRO-2 as well.
        """
        x, width = self._x, self._s.workload.numbers.weight_bytes
        layers = np.maximum(stage.layers, 1.0)
        dense = self._held[id(stage)].dense_parameters / layers
        experts = self._held[id(stage)].expert_parameters / layers
        gather = np.where(x.zero == 3, self._over_shards("all_gather", dense * width, experts * width), 0.0)
        many = (x.reduce_gradients == EVERY) & (x.accumulation > 1)
        scatter = np.where(many & (x.zero >= 2), self._reduction(dense, experts), 0.0)
        forward_wait, forward_hidden = self._behind(gather, forward_s / layers, self._s.stack.prefetches_weights)
        backward_wait, backward_hidden = self._behind(
            gather + scatter, backward_s / layers, self._s.stack.prefetches_weights
        )
        return Gather(
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

    def _gradient_reduction(self, stage: Stage, time: StageTime) -> tuple[Column, Column]:
        """Once a step, under the backward of the last micro batch; the last layer's bucket cannot hide."""
        x, held = self._x, self._held[id(stage)]
        many = (x.reduce_gradients == EVERY) & (x.accumulation > 1) & (x.zero >= 2)
        seconds = np.where(many, 0.0, self._reduction(held.dense_parameters, held.expert_parameters))
        room = time.input_grad_s + time.weight_grad_s
        return self._all_but_one_layer(stage, seconds, room, self._s.stack.overlaps_gradients)

    def _parameter_gather(self, stage: Stage, time: StageTime) -> tuple[Column, Column]:
        """ZeRO-1 and 2 gather the updated weights once a step, layer by layer before the first forward."""
        width, held = self._s.workload.numbers.weight_bytes, self._held[id(stage)]
        once = (self._x.zero == 1) | (self._x.zero == 2)
        bytes_ = (held.dense_parameters * width, held.expert_parameters * width)
        seconds = np.where(once, self._over_shards("all_gather", *bytes_), 0.0)
        return self._all_but_one_layer(stage, seconds, time.forward_s, self._s.stack.overlaps_parameters)

    def _all_but_one_layer(
        self, stage: Stage, seconds: Column, room_s: Column, overlaps: bool
    ) -> tuple[Column, Column]:
        """Exposed and hidden seconds of traffic that goes layer by layer and starts when the first layer is done."""
        if not overlaps:
            return seconds, np.zeros_like(seconds)
        layers = np.maximum(stage.layers, 1.0)
        exposed = np.maximum(seconds - room_s * (1 - 1 / layers), seconds / layers)
        return exposed, seconds - exposed

    def _update(self, stage: Stage) -> tuple[Column, Column]:
        """The optimizer's update on the shard, and what swapping its state in and out takes beyond that."""
        numbers = self._s.workload.numbers
        elements = self._held[id(stage)].sharded_parameters
        update = self._compute.optimizer_s(elements)
        each = self._s.workload.optimizer_state_bytes + numbers.main_weight_bytes
        host = self._s.cluster.device.host_bandwidth_bytes_per_s
        # In and out run at once on a full-duplex link; the state passes once each way.
        moved = elements * each / host if host else np.full_like(elements, np.inf)
        return update, np.where(self._x.swap_optimizer == 1, np.maximum(moved - update, 0.0), 0.0)

    def _offload_wait(self, stage: Stage, work_s: Column) -> Column:
        """Activations go out under forward and come back under backward; what exceeds the work is waited for.

        Neither can run on into the other: memory holds but a window of layers (`stage_memory`).
        """
        host = self._s.cluster.device.host_bandwidth_bytes_per_s
        moved = stage.layers * self._held[id(stage)].kept_per_layer
        wait = np.maximum(moved / host - work_s, 0.0) if host else np.full_like(moved, np.inf)
        return np.where(self._x.activation_offload == 1, wait, 0.0)

    def _fill_s(self, times: tuple[StageTime, ...]) -> Column:
        """Seconds that the slowest rank waits while a micro batch fills or drains the pipeline.

        It passes every rank once, so the fill takes the mean of the ranks' times and not the slowest.
        """
        x = self._x
        weights = [np.where(stage.exists, stage.count, 0) / x.pp for stage in self._stages]

        def mean(seconds: Iterable[Column]) -> Column:
            return reduce(np.add, (weight * each for weight, each in zip(weights, seconds, strict=True)))

        p2p = self._clock.seconds("send_recv", self._groups.pp, boundary_bytes(self._s, x))
        return bubble_s(
            x.schedule,
            x.pp,
            x.vpp,
            x.accumulation,
            mean(t.forward_s for t in times),
            mean(t.input_grad_s for t in times),
            mean(t.weight_grad_s for t in times),
            np.where(x.pp > 1, p2p, 0.0),
        )

    def _flops(self) -> Column:
        """FLOPs of one micro batch over all pipeline ranks, recomputation included."""
        model, head = self._s.model, self._head.compute
        total = model.dense_layers * self._layer_flops(self._dense) + (head.forward_flops + head.backward_flops)
        return total + model.moe_layers * self._layer_flops(self._moe) if self._moe else total

    def _layer_flops(self, part: PartCost) -> Column:
        c, selective = part.compute, self._x.recompute == SELECTIVE
        redone = self._redo_share() * c.full_flops + np.where(selective, c.selective_flops, 0.0)
        return c.forward_flops + c.backward_flops + redone


@dataclass(frozen=True, slots=True)
class _Redo:
    seconds: Column
    kernels: Column | float
    comm_s: dict[str, Column]


_NO_REDO = _Redo(np.asarray(0.0), 0.0, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    times: tuple[StageTime, ...]
    tails: tuple[Tail, ...]
    ends_s: list[Column]
    longest_s: Column
    fill_s: Column
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


def _sum(by_dimension: dict[str, Column]) -> Column:
    return reduce(np.add, by_dimension.values(), np.asarray(0.0))
