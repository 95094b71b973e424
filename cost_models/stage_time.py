"""Seconds of one micro batch on one pipeline rank, with everything that the rank waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cost_models.part_cost import DIMENSIONS, NO_REDO, PartCosts, total_s

if TYPE_CHECKING:
    from cost_models.data_traffic import DataTraffic, Gather
    from cost_models.layout import Column, Layouts
    from cost_models.setting import Setting
    from cost_models.stage_memory import StageMemory


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


class StageTimer:
    """Adds up the parts that a rank holds."""

    def __init__(self, setting: Setting, layouts: Layouts, parts: PartCosts, traffic: DataTraffic) -> None:
        self._s = setting
        self._x = layouts
        self._fit = setting.calibration
        self._parts = parts
        self._traffic = traffic

    def time(self, held: StageMemory) -> StageTime:
        """One micro batch on the rank."""
        stage, costs = held.stage, self._parts
        parts = [(stage.dense_layers, costs.dense, True), (stage.has_embedding, costs.embedding, False)]
        parts += [(stage.moe_layers, costs.moe, True)] if costs.moe else []
        parts += [(stage.has_head, costs.head, False)]
        forward = input_grad = weight_grad = computing = redone = hidden = free = np.asarray(0.0)
        comm: dict[str, Column] = dict.fromkeys(DIMENSIONS, np.asarray(0.0))
        for count, part, is_layer in parts:
            c = part.compute
            redo = costs.redo(part) if is_layer else NO_REDO
            f_comm, b_comm = total_s(part.forward_comm_s), total_s(part.backward_comm_s) + total_s(redo.comm_s)
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
        gather = self._traffic.each_micro_batch(held, forward, input_grad + weight_grad)
        slow = self._fit.overlap_slowdown * gather.hidden_s
        forward, input_grad = forward + gather.forward_s, input_grad + (gather.backward_s + slow)
        out_wait = self._offload_wait(held, forward)
        in_wait = self._offload_wait(held, input_grad + weight_grad)
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

    def _offload_wait(self, held: StageMemory, work_s: Column) -> Column:
        """Activations go out under forward and come back under backward; what exceeds the work is waited for.

        Neither can run on into the other: memory holds but a window of layers (`stage_memory`).
        """
        host = self._s.cluster.device.host_bandwidth_bytes_per_s
        moved = held.stage.layers * held.kept.kept_per_layer
        wait = np.maximum(moved / host - work_s, 0.0) if host else np.full_like(moved, np.inf)
        return np.where(self._x.activation_offload == 1, wait, 0.0)
