"""What a part of the model (layer, embedding, head) costs a micro batch: compute, and collectives it waits for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from cost_models.compute import ComputeModel, PartTime
from cost_models.parameters import layers_per_virtual_stage
from cost_models.stage_activations import FULL, SELECTIVE

if TYPE_CHECKING:
    from cost_models.groups import CollectiveClock, Groups
    from cost_models.layout import Column, Layouts
    from cost_models.operator_values import Operator
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


@dataclass(frozen=True, slots=True)
class Redo:
    """What recomputation adds to the backward of one part."""

    seconds: Column
    kernels: Column | float
    comm_s: dict[str, Column]


NO_REDO = Redo(np.asarray(0.0), 0.0, {})


class PartCosts:
    """Costs the parts of one model under the layouts of a search."""

    def __init__(self, setting: Setting, layouts: Layouts, groups: Groups, clock: CollectiveClock) -> None:
        self._s = setting
        self._x = layouts
        self._groups = groups
        self._clock = clock
        self.compute = ComputeModel(
            device=setting.cluster.device,
            calibration=setting.calibration,
            workload=setting.workload,
            stack=setting.stack,
        )
        table = setting.operator_table(layouts)
        self.dense = self._part(table.dense_layer())
        self.moe = self._part(table.moe_layer()) if setting.model.moe else None
        self.embedding, self.head = self._part(table.embedding()), self._part(table.head())

    def _part(self, operators: tuple[Operator, ...]) -> PartCost:
        compute = self.compute.part_time(operators)
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
                if self._s.stack.recompute_to_last_saved and (op.last or not call.in_recompute):
                    skipped = skipped + each
        return ring, plain, skipped

    def redo_share(self) -> Column:
        """Share of a stage's layers that full recomputation runs again."""
        x = self._x
        per_stage = layers_per_virtual_stage(self._s.model, x)
        some = np.minimum(x.recompute_layers / per_stage, 1.0)
        return np.where(x.recompute == FULL, np.where(x.recompute_layers > 0, some, 1.0), 0.0)

    def redo(self, part: PartCost) -> Redo:
        """What the layout's recomputation adds to a layer."""
        share, selective = self.redo_share(), self._x.recompute == SELECTIVE
        c = part.compute
        return Redo(
            seconds=share * c.full_s + np.where(selective, c.selective_s, 0.0),
            kernels=share * c.forward_kernels + np.where(selective, c.selective_kernels, 0.0),
            comm_s={name: share * seconds for name, seconds in part.redo_comm_s.items()},
        )

    def flops(self) -> Column:
        """FLOPs of one micro batch over all pipeline ranks, recomputation included."""
        model, head = self._s.model, self.head.compute
        total = model.dense_layers * self._layer_flops(self.dense) + (head.forward_flops + head.backward_flops)
        return total + model.moe_layers * self._layer_flops(self.moe) if self.moe else total

    def _layer_flops(self, part: PartCost) -> Column:
        c, selective = part.compute, self._x.recompute == SELECTIVE
        redone = self.redo_share() * c.full_flops + np.where(selective, c.selective_flops, 0.0)
        return c.forward_flops + c.backward_flops + redone


def total_s(by_dimension: dict[str, Column]) -> Column:
    """Seconds over all dimensions."""
    return reduce(np.add, by_dimension.values(), np.asarray(0.0))
