"""Data parallelism on one rank: gathering weights and reducing gradients, every micro batch or once a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from cost_models.stage_states import EVERY

if TYPE_CHECKING:
    from cost_models.groups import CollectiveClock, Groups
    from cost_models.layout import Column, Layouts
    from cost_models.setting import Setting
    from cost_models.stage_memory import StageMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """ZeRO traffic of one micro batch on one rank: waited for in forward and backward, and hidden under compute."""

    forward_s: Column
    backward_s: Column
    hidden_s: Column


class DataTraffic:
    """Times the traffic on the links that the shard and replica groups have."""

    def __init__(self, setting: Setting, layouts: Layouts, groups: Groups, clock: CollectiveClock) -> None:
        self._s = setting
        self._x = layouts
        self._groups = groups
        self._clock = clock

    def each_micro_batch(self, held: StageMemory, forward_s: Column, backward_s: Column) -> Gather:
        """ZeRO-3 gathers each layer's weights before its forward and again before its backward, every micro batch.

        Reducing gradients after every micro batch adds its scatter, wherever gradients are sharded.
        """
        x, width = self._x, self._s.workload.numbers.weight_bytes
        layers = np.maximum(held.stage.layers, 1.0)
        dense = held.states.dense_parameters / layers
        experts = held.states.expert_parameters / layers
        gather = np.where(x.zero == 3, self._over_shards("all_gather", dense * width, experts * width), 0.0)
        scatter = np.where(self._scatters_each, self._scatter(dense, experts), 0.0)
        forward_wait, forward_hidden = self._behind(gather, forward_s / layers, self._s.stack.prefetches_weights)
        backward_wait, backward_hidden = self._behind(
            gather + scatter, backward_s / layers, self._s.stack.prefetches_weights
        )
        return Gather(
            forward_s=layers * forward_wait,
            backward_s=layers * backward_wait,
            hidden_s=layers * (forward_hidden + backward_hidden),
        )

    def gradients_s(self, held: StageMemory, backward_s: Column) -> tuple[Column, Column]:
        """Exposed and hidden: once a step, under the last micro batch's backward; the last layer's cannot hide."""
        dense, experts = held.states.dense_parameters, held.states.expert_parameters
        scatter = np.where(self._scatters_each, 0.0, self._scatter(dense, experts))
        seconds = scatter + self._sum_replicas(dense, experts)
        return self._all_but_one_layer(held, seconds, backward_s, self._s.stack.overlaps_gradients)

    def parameters_s(self, held: StageMemory, forward_s: Column) -> tuple[Column, Column]:
        """Exposed and hidden: ZeRO-1 and 2 gather the updated weights once a step, before the first forward."""
        width = self._s.workload.numbers.weight_bytes
        once = (self._x.zero == 1) | (self._x.zero == 2)
        dense, experts = held.states.dense_parameters * width, held.states.expert_parameters * width
        seconds = np.where(once, self._over_shards("all_gather", dense, experts), 0.0)
        return self._all_but_one_layer(held, seconds, forward_s, self._s.stack.overlaps_parameters)

    def _behind(self, comm_s: Column, compute_s: Column, overlaps: bool) -> tuple[Column, Column]:
        """Exposed and hidden seconds of communication that may run beside compute."""
        hidden = np.minimum(comm_s, compute_s) if overlaps else np.zeros_like(comm_s)
        return comm_s - hidden, hidden

    def _over_shards(self, kind: str, dense_bytes: Column, expert_bytes: Column) -> Column:
        g = self._groups
        seconds = self._clock.seconds(kind, g.shard, dense_bytes)
        return seconds + self._clock.seconds(kind, g.expert_shard, expert_bytes) if self._s.model.moe else seconds

    @property
    def _scatters_each(self) -> Column:
        """Whether gradients are scattered after each of several micro batches."""
        x, least = self._x, 1 if self._s.stack.fsdp else 2
        return (x.reduce_gradients == EVERY) & (x.accumulation > 1) & (x.zero >= least)

    @property
    def _gradient_bytes(self) -> int:
        return self._s.stack.gradient_bytes if self._s.workload.numbers.main_weight_bytes else 4

    def _scatter(self, dense: Column, experts: Column) -> Column:
        """Gradients of these elements over the shards."""
        g, size = self._groups, self._gradient_bytes
        seconds = np.where(self._x.zero > 0, self._clock.seconds("reduce_scatter", g.shard, dense * size), 0.0)
        if self._s.model.moe is None:
            return seconds
        return seconds + self._clock.seconds("reduce_scatter", g.expert_shard, experts * size)

    def _sum_replicas(self, dense: Column, experts: Column) -> Column:
        """Gradients of these elements, or the shards of them, over the ranks that hold the same."""
        g, x, size = self._groups, self._x, self._gradient_bytes
        shards = np.where(x.zero > 0, x.dp_shard * x.cp, 1)
        whole = self._clock.seconds("all_reduce", g.data, dense * size)
        split = self._clock.seconds("all_reduce", g.replica, dense * size / shards)
        seconds = np.where(x.zero > 0, split, whole)
        if self._s.model.moe is None:
            return seconds
        spread = reduce(np.multiply, (axis[0] for axis in g.expert_shard))
        return seconds + self._clock.seconds("all_reduce", g.expert_replica, experts * size / spread)

    def _all_but_one_layer(
        self, held: StageMemory, seconds: Column, room_s: Column, overlaps: bool
    ) -> tuple[Column, Column]:
        """Exposed and hidden seconds of traffic that goes layer by layer and starts when the first layer is done."""
        if not overlaps:
            return seconds, np.zeros_like(seconds)
        layers = np.maximum(held.stage.layers, 1.0)
        exposed = np.maximum(seconds - room_s * (1 - 1 / layers), seconds / layers)
        return exposed, seconds - exposed
