"""Parameters of one pipeline rank and what is kept for each: weights, gradients, optimizer state."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cost_models.layout import REDUCTIONS

if TYPE_CHECKING:
    from cost_models.layout import Column, Layouts
    from cost_models.parameters import PartParameters, Stage
    from cost_models.setting import Setting

EVERY = REDUCTIONS.index("every")
# Swapped optimizer state passes through the device in this many slices, two of them there at a time (one computed,
# one on its way): MindSpeed's swap-optimizer-times, whose documented default is 16.
SWAP_SLICES = 16
FP32_BYTES = 4


class StageStates:
    """Bytes that depend on how parameters are sharded. Each is a column in the shape of what it depends on."""

    def __init__(
        self,
        setting: Setting,
        layouts: Layouts,
        params: PartParameters,
        shard: Column,
        expert_shard: Column,
        stage: Stage,
    ) -> None:
        self._s, self._x, self._params, self._stage = setting, layouts, params, stage
        self.shard, self.expert_shard = shard, expert_shard

    @cached_property
    def dense_parameters(self) -> Column:
        """Elements that all dp x cp ranks hold alike."""
        p, stage = self._params, self._stage
        ends = stage.has_embedding * p.embedding + stage.has_head * p.head
        return stage.total(p.dense_layer, p.moe_layer) + ends

    @cached_property
    def expert_parameters(self) -> Column:
        """Elements of routed experts."""
        return self._stage.moe_layers * self._params.experts

    @cached_property
    def sharded_parameters(self) -> Column:
        """Elements that this rank's optimizer updates."""
        return self.dense_parameters / self.shard + self.expert_parameters / self.expert_shard

    @cached_property
    def whole_parameters(self) -> Column:
        """All elements of the rank."""
        return self.dense_parameters + self.expert_parameters

    @cached_property
    def top_layer(self) -> tuple[Column, Column]:
        """Elements of the last layer without its experts, and of these."""
        p, sparse = self._params, self._stage.moe_layers > 0
        return np.where(sparse, p.moe_layer, p.dense_layer), np.where(sparse, p.experts, 0.0)

    @cached_property
    def last_tensor(self) -> Column:
        """Elements of the last tensor of the last layer without its experts: the down projection of a dense MLP."""
        m = self._s.model
        shared = m.moe.shared_ffn_dim if m.moe else 0
        wide = np.where(self._stage.moe_layers > 0, shared, m.ffn_dim)
        return wide * m.hidden_dim / self._x.tp

    @cached_property
    def experts_turned(self) -> Column:
        """Whether shards of the experts are cut along another axis than the first, which has a row an expert."""
        experts = self._s.model.moe.experts if self._s.model.moe else 1
        local = experts // np.maximum(self._x.ep, 1)
        return local % self.expert_shard != 0

    @cached_property
    def ends(self) -> tuple[Column, Column]:
        """Elements of embedding and head where the rank has them. A tied table of one stage is with neither."""
        p, stage = self._params, self._stage
        return stage.has_embedding * p.embedding, stage.has_head * p.head

    @cached_property
    def weight_bytes(self) -> int:
        """Of a parameter as the model computes with it."""
        return self._s.workload.numbers.weight_bytes

    @cached_property
    def lasting_weights(self) -> Column:
        """Weights of the whole step: under ZeRO-0 all; with ZeRO-3 a low-precision shard if the main one left."""
        numbers, x = self._s.workload.numbers, self._x
        if not self._s.stack.fsdp:
            left = self.sharded_parameters * numbers.weight_bytes
            kept = np.where(x.swap_optimizer == 1, left, 0.0) if numbers.main_weight_bytes else left
            return np.where(x.zero == 3, kept, self.whole_parameters * numbers.weight_bytes)
        shard = np.where(x.swap_optimizer == 1, self.sharded_parameters * numbers.weight_bytes, 0.0)
        low = shard if numbers.main_weight_bytes else self.sharded_parameters * numbers.weight_bytes * (x.zero == 3)
        return np.where(x.zero > 0, low, self.whole_parameters * numbers.weight_bytes)

    @cached_property
    def main_weights(self) -> Column:
        """Full precision: ZeRO-1 and 2 keep a shard beside the gathered weights, ZeRO 0 and 3 need no second copy."""
        numbers, x = self._s.workload.numbers, self._x
        if numbers.main_weight_bytes:
            on_device = np.where(x.swap_optimizer == 1, 0.0, numbers.main_weight_bytes)
            return self.sharded_parameters * on_device
        gathers = (x.zero == 1) | (x.zero == 2)
        if self._s.stack.fsdp:
            return np.where(gathers, self.sharded_parameters * numbers.weight_bytes, 0.0)
        dense = np.where(self.shard > 1, self.dense_parameters / self.shard, 0.0)
        experts = np.where(self.expert_shard > 1, self.expert_parameters / self.expert_shard, 0.0)
        return np.where(gathers, (dense + experts) * numbers.weight_bytes, 0.0)

    @cached_property
    def optimizer(self) -> Column:
        """Moments."""
        on_device = np.where(self._x.swap_optimizer == 1, 0.0, self._s.workload.optimizer_state_bytes)
        return self.sharded_parameters * on_device

    @cached_property
    def gradient_bytes(self) -> int:
        """Of an accumulated gradient."""
        numbers = self._s.workload.numbers
        return self._s.stack.gradient_bytes if numbers.main_weight_bytes else numbers.weight_bytes

    @cached_property
    def lasting_gradients(self) -> Column:
        """Gradients that are there through the whole step, without units: whole, or sharded as they come."""
        x, stack = self._x, self._s.stack
        if stack.fsdp:
            alone = (x.dp * x.cp == 1) & (not self._s.workload.numbers.main_weight_bytes)
            flat = np.where(alone, 0.0, self.whole_parameters * float(FP32_BYTES))
            return np.where(x.zero > 0, 0.0, flat)
        at_once = (x.reduce_gradients == EVERY) | (x.accumulation == 1)
        sharded = (x.zero >= 2) & at_once & (not stack.whole_gradients)
        return np.where(sharded, self.sharded_parameters, self.whole_parameters) * self.gradient_bytes

    @cached_property
    def _swapped_bytes(self) -> int:
        return self._s.workload.optimizer_state_bytes + self._s.workload.numbers.main_weight_bytes

    @cached_property
    def swap_slices(self) -> Column:
        """Slices of a swapped optimizer on the device during the update."""
        slices = 2.0 / SWAP_SLICES * self._swapped_bytes * self.sharded_parameters
        return np.where(self._x.swap_optimizer == 1, slices, 0.0)

    @cached_property
    def swapped(self) -> Column:
        """Main weights and moments in host memory."""
        swaps = self._stage.exists & (self._x.swap_optimizer == 1)
        return np.where(swaps, self._swapped_bytes * self.sharded_parameters, 0.0)
