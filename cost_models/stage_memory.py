"""Bytes that one pipeline rank holds, by what they are and by what decides them."""

from __future__ import annotations

from functools import cached_property, reduce
from typing import TYPE_CHECKING

import numpy as np

from cost_models.layout import RECOMPUTES, REDUCTIONS
from cost_models.operators import padded_vocab, saved_bytes
from cost_models.parameters import (
    PartParameters,
    Stage,
    expert_shard_degree,
    layers_per_virtual_stage,
    shard_degree,
)
from cost_models.pipeline import live_chunks
from cost_models.schedules import GPIPE, ZERO_BUBBLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cost_models.layout import Column, Layouts
    from cost_models.operator_values import Operator, Saved
    from cost_models.setting import Setting

SELECTIVE, FULL = RECOMPUTES.index("selective"), RECOMPUTES.index("full")
EVERY = REDUCTIONS.index("every")
# Swapped optimizer state passes through the device in this many slices, two of them there at a time (one computed,
# one on its way): MindSpeed's swap-optimizer-times, whose documented default is 16.
SWAP_SLICES = 16
# Layers whose offloaded activations are on the device: the one in use and the one on its way.
_OFFLOAD_WINDOW = 2.0
# Sends and receives of a stage boundary that may be under way at once: one of each, in each direction.
_PIPELINE_BUFFERS = 4.0


class ModelParts:
    """What all ranks share: operators, parameters and shard degrees of the layouts."""

    def __init__(self, setting: Setting, layouts: Layouts) -> None:
        table = setting.operator_table(layouts)
        self.dense, self.moe = table.dense_layer(), table.moe_layer()
        self.embedding, self.head = table.embedding(), table.head()
        self.params = PartParameters.of(setting.model, layouts)
        self.shard, self.expert_shard = shard_degree(layouts), expert_shard_degree(layouts)


class StageMemory:
    """One rank's bytes. Each quantity is a column in the shape of what it depends on, made once."""

    def __init__(self, setting: Setting, layouts: Layouts, parts: ModelParts, stage: Stage) -> None:
        self._s = setting
        self._x = layouts
        self._parts = parts
        self._params = parts.params
        self.stage = stage

    @cached_property
    def dense_parameters(self) -> Column:
        """Elements that all dp x cp ranks hold alike."""
        p = self._params
        ends = self.stage.has_embedding * p.embedding + self.stage.has_head * p.head
        return self.stage.total(p.dense_layer, p.moe_layer) + ends

    @cached_property
    def expert_parameters(self) -> Column:
        """Elements of routed experts."""
        return self.stage.moe_layers * self._params.experts

    @cached_property
    def sharded_parameters(self) -> Column:
        """Elements that this rank's optimizer updates."""
        return self.dense_parameters / self._parts.shard + self.expert_parameters / self._parts.expert_shard

    @cached_property
    def whole_parameters(self) -> Column:
        """All elements of the rank."""
        return self.dense_parameters + self.expert_parameters

    @cached_property
    def weights(self) -> Column:
        """ZeRO 0-2: whole. ZeRO-3: the shard is the main weight; swapped out, a low-precision shard stays."""
        numbers = self._s.workload.numbers
        left = self.sharded_parameters * numbers.weight_bytes
        kept = np.where(self._x.swap_optimizer == 1, left, 0.0) if numbers.main_weight_bytes else left
        return np.where(self._x.zero == 3, kept, self.whole_parameters * numbers.weight_bytes)

    @cached_property
    def main_weights(self) -> Column:
        """Full precision: ZeRO-1 and 2 keep a shard beside the gathered weights, ZeRO 0 and 3 need no second copy."""
        numbers = self._s.workload.numbers
        if numbers.main_weight_bytes:
            on_device = np.where(self._x.swap_optimizer == 1, 0.0, numbers.main_weight_bytes)
            return self.sharded_parameters * on_device
        gathers = (self._x.zero == 1) | (self._x.zero == 2)
        dense = np.where(self._parts.shard > 1, self.dense_parameters / self._parts.shard, 0.0)
        experts = np.where(self._parts.expert_shard > 1, self.expert_parameters / self._parts.expert_shard, 0.0)
        return np.where(gathers, (dense + experts) * numbers.weight_bytes, 0.0)

    @cached_property
    def optimizer(self) -> Column:
        """Moments."""
        on_device = np.where(self._x.swap_optimizer == 1, 0.0, self._s.workload.optimizer_state_bytes)
        return self.sharded_parameters * on_device

    @cached_property
    def _gradient_bytes(self) -> int:
        numbers = self._s.workload.numbers
        return self._s.stack.gradient_bytes if numbers.main_weight_bytes else numbers.weight_bytes

    @cached_property
    def _shards_gradients(self) -> Column:
        """Whether gradients are sharded at the peak. Reduced after the last micro batch, they are whole until then."""
        if self._s.stack.whole_gradients:
            return np.zeros_like(self._x.zero, dtype=bool)
        at_once = (self._x.reduce_gradients == EVERY) | (self._x.accumulation == 1)
        return (self._x.zero >= 2) & at_once

    @cached_property
    def gradients(self) -> Column:
        """Accumulated gradients."""
        elements = np.where(self._shards_gradients, self.sharded_parameters, self.whole_parameters)
        return elements * self._gradient_bytes

    @cached_property
    def _layer_parameters(self) -> Column:
        """Elements of the largest layer of the stage, gathered."""
        p = self._params
        moe = np.where(self.stage.moe_layers > 0, p.moe_layer + p.experts, 0.0)
        return np.maximum(np.where(self.stage.dense_layers > 0, p.dense_layer, 0.0), moe)

    @cached_property
    def gathered(self) -> Column:
        """ZeRO-3: the layer in use and the one on its way (embedding and head are units of their own)."""
        layer, p = self._layer_parameters, self._params
        ends = np.maximum(self.stage.has_embedding * p.embedding, self.stage.has_head * p.head)
        shard = np.where(self._x.swap_optimizer == 1, self.sharded_parameters, 0.0)
        alive = np.minimum(layer + np.maximum(layer, ends), self.whole_parameters - shard)
        return np.where(self._x.zero == 3, alive * self._s.workload.numbers.weight_bytes, 0.0)

    @cached_property
    def buckets(self) -> Column:
        """Reduction copies a layer in full precision; where gradients are sharded, two layers' are whole at a time."""
        layer, size = self._layer_parameters, self._gradient_bytes
        copy = np.where(self._x.dp * self._x.cp > 1, layer * size, 0.0)
        not_sharded = (self.whole_parameters - self.sharded_parameters) * size
        return copy + np.where(self._shards_gradients, np.minimum(2 * layer * size, not_sharded), 0.0)

    @cached_property
    def loss(self) -> Column:
        """Logits of a chunk with their full-precision copy and gradient; the kept part of unchunked ones is saved."""
        stack, x = self._s.stack, self._x
        tokens = x.micro_batch * float(self._s.workload.seq_len) / x.cp
        chunk = np.minimum(tokens, stack.loss_chunk_tokens) if stack.loss_chunk_tokens else tokens
        each = stack.logits_bytes - (0 if stack.loss_chunk_tokens else 4)
        vocab = padded_vocab(self._s.model.vocab_size, x.tp.astype(float)) / x.tp
        return self.stage.has_head * chunk * vocab * each

    @cached_property
    def working_set(self) -> Column:
        """What one layer's backward holds for a moment: gathered inputs, the widest gradients, redone tensors."""
        full = self._x.micro_batch * float(self._s.workload.seq_len) / self._x.cp
        width = self._s.workload.numbers.activation_bytes
        hidden = full * self._s.model.hidden_dim * width
        wide = reduce(np.maximum, (_widest(ops) for ops in (self._parts.dense, self._parts.moe) if ops))
        return 2 * hidden + 2 * wide + self._redone

    @cached_property
    def _redone(self) -> Column:
        """Recomputed tensors of one layer, less what later layers of the stage have freed by then."""
        layer = self._mean_layer(frozenset())
        selective = layer - self._mean_layer(self._s.stack.selective)
        per_stage = layers_per_virtual_stage(self._s.model, self._x)
        freed = np.where(self._x.recompute_layers > 0, (per_stage - self._x.recompute_layers) * layer, 0.0)
        full = np.maximum(layer - freed, 0.0)
        return np.where(self._x.recompute == FULL, full, np.where(self._x.recompute == SELECTIVE, selective, 0.0))

    def _mean_layer(self, redone: frozenset[str]) -> Column:
        """Saved bytes of a layer, the mean of the stage's kinds."""
        dense, moe = saved_bytes(self._parts.dense, redone), saved_bytes(self._parts.moe, redone)
        return self.stage.total(np.asarray(dense), np.asarray(moe)) / np.maximum(self.stage.layers, 1)

    @cached_property
    def kept_per_layer(self) -> Column:
        """Bytes that a layer keeps in flight under the layout's recomputation, the mean of the virtual stage."""
        x = self._x
        none = self._mean_layer(frozenset())
        selective = self._mean_layer(self._s.stack.selective)
        checkpoint = _named(self._parts.dense or self._parts.moe, "attention_norm_input")
        per_stage = layers_per_virtual_stage(self._s.model, x)
        share = np.where(x.recompute_layers > 0, np.minimum(x.recompute_layers / per_stage, 1.0), 1.0)
        full = share * checkpoint + (1.0 - share) * none
        return np.where(x.recompute == FULL, full, np.where(x.recompute == SELECTIVE, selective, none))

    @cached_property
    def _in_flight(self) -> tuple[Column, Column]:
        """Layers whose activations are alive at the peak, and micro batches whose embedding is."""
        x = self._x
        chunks = live_chunks(x.schedule, x.pp, x.vpp, x.accumulation, np.clip(self.stage.rank, 0, x.pp - 1))
        return chunks * self.stage.layers / x.vpp, np.ceil(chunks / x.vpp)

    @cached_property
    def _live(self) -> Column:
        """All activations in flight, on the device or off it."""
        layers, micro_batches = self._in_flight
        embedding = self.stage.has_embedding * np.asarray(saved_bytes(self._parts.embedding))
        head = self.stage.has_head * np.asarray(saved_bytes(self._parts.head))
        return layers * self.kept_per_layer + micro_batches * embedding + self._live_heads() * head

    def _live_heads(self) -> Column:
        """Micro batches whose logits are alive: the last virtual stage turns each around at once, in most schedules.

        GPipe runs all forwards first; "zero-bubble" puts weight gradients off by as many backwards as the last rank's
        number. Equal to what the action lists of `cost_models.schedules` keep of the last stage.
        """
        x = self._x
        split = np.where(x.schedule == ZERO_BUBBLE, np.minimum(x.accumulation, x.pp), 1)
        return np.where(x.schedule == GPIPE, x.accumulation, split)

    @cached_property
    def activations(self) -> Column:
        """Activations in flight on the device."""
        live = self._live
        window = _OFFLOAD_WINDOW * self.kept_per_layer
        return np.where(self._x.activation_offload == 1, np.minimum(live, window), live)

    @cached_property
    def swap_slices(self) -> Column:
        """Slices of a swapped optimizer on the device during the step."""
        numbers = self._s.workload.numbers
        each = self._s.workload.optimizer_state_bytes + numbers.main_weight_bytes
        return np.where(self._x.swap_optimizer == 1, 2.0 / SWAP_SLICES * each * self.sharded_parameters, 0.0)

    @cached_property
    def swapped(self) -> Column:
        """Main weights and moments in host memory."""
        numbers = self._s.workload.numbers
        each = self._s.workload.optimizer_state_bytes + numbers.main_weight_bytes
        return np.where(self.stage.exists & (self._x.swap_optimizer == 1), each * self.sharded_parameters, 0.0)

    @cached_property
    def offloaded(self) -> Column:
        """Activations in host memory."""
        offloads = self.stage.exists & (self._x.activation_offload == 1)
        return np.where(offloads, self._live - self.activations, 0.0)

    @cached_property
    def static(self) -> Column:
        """What lives through the whole step; less than nothing where the layout has no such rank."""
        kept = self.weights + self.main_weights + self.optimizer + self.pipeline_buffers
        return np.where(self.stage.exists, kept, -np.inf) + self.gradients

    @cached_property
    def by_shard(self) -> Column:
        """What sharding decides of a micro batch's peak."""
        return self.gathered + self.buckets

    @cached_property
    def by_recompute(self) -> Column:
        """What recomputation and offload decide of it."""
        return self.activations + (self.working_set + self.loss)

    @cached_property
    def tensors(self) -> Column:
        """Live bytes at the peak: of a micro batch's backward, or of the optimizer's step."""
        return np.maximum(self.by_recompute + self.by_shard, self.swap_slices) + self.static

    def categories(self) -> dict[str, Column]:
        """The same bytes by category."""
        transient = self.by_shard + (self.working_set + self.loss)
        updates = self.swap_slices > self.activations + transient
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "main_weights": self.main_weights,
            "optimizer": self.optimizer,
            "activations": np.where(updates, 0.0, self.activations),
            "transient": np.where(updates, self.swap_slices, transient),
            "pipeline_buffers": self.pipeline_buffers,
        }

    @cached_property
    def pipeline_buffers(self) -> Column:
        """Sends and receives under way."""
        return np.where(self._x.pp > 1, _PIPELINE_BUFFERS * boundary_bytes(self._s, self._x), 0.0)


def boundary_bytes(setting: Setting, layouts: Layouts) -> Column:
    """One micro batch's activations at a stage boundary; sequence parallelism sends each rank's part only."""
    tokens = layouts.micro_batch * float(setting.workload.seq_len) / layouts.cp
    own = np.where(layouts.sp == 1, tokens / layouts.tp, tokens)
    return own * setting.model.hidden_dim * setting.workload.numbers.activation_bytes


def first_with(value: Column, options: Sequence[Column]) -> Column:
    """Index of the first option that equals `value`, element by element; one of them does."""
    index = np.asarray(len(options) - 1)
    for i in reversed(range(len(options) - 1)):
        index = np.where(options[i] == value, i, index)
    return index


def _named(operators: tuple[Operator, ...], name: str) -> Column:
    """Bytes of a saved tensor of the table."""
    found: list[Saved] = [s for op in operators for s in op.saved if s.name == name]
    return found[0].n_bytes


def _widest(operators: tuple[Operator, ...]) -> Column:
    """The largest tensor pair of a layer: what the MLP's activation reads."""
    return reduce(np.maximum, (s.n_bytes for op in operators for s in op.saved if s.name.endswith("_up")))
