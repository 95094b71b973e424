"""Peak device memory of the worst pipeline rank, by category, and the host memory that swapping takes.

A category says what the bytes are, a moment says what is alive together. Two moments can be the peak: the first
backward after the warm-up, with most micro batches in flight, and the optimizer step, with no activations but with the
slices of a swapped optimizer. Weights, gradients and moments follow Rajbhandari et al. 2020 (arXiv:1910.02054,
section 3); activations in flight follow Narayanan et al. 2021 (arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from cost_models.layout import RECOMPUTES, REDUCTIONS
from cost_models.operators import Saved, padded_vocab, saved_bytes
from cost_models.parameters import (
    PartParameters,
    Stage,
    expert_shard_degree,
    layers_per_virtual_stage,
    shard_degree,
    telling_stages,
)
from cost_models.pipeline import live_chunks

if TYPE_CHECKING:
    from cost_models.layout import Column, Layouts
    from cost_models.operators import Operator
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
SELECTIVE, FULL = RECOMPUTES.index("selective"), RECOMPUTES.index("full")
EVERY = REDUCTIONS.index("every")
# Swapped optimizer state passes through the device in this many slices, two of them there at a time (one computed,
# one on its way): MindSpeed's swap-optimizer-times, whose documented default is 16.
SWAP_SLICES = 16
# Layers whose offloaded activations are on the device: the one in use and the one on its way.
_OFFLOAD_WINDOW = 2.0
# Sends and receives of a stage boundary that may be under way at once: one of each, in each direction.
_PIPELINE_BUFFERS = 4.0


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
        table = setting.operator_table(layouts)
        self._dense, self._moe = table.dense_layer(), table.moe_layer()
        self._embedding, self._head = table.embedding(), table.head()
        self._params = PartParameters.of(setting.model, layouts)
        self._shard, self._expert_shard = shard_degree(layouts), expert_shard_degree(layouts)

    def estimate(self) -> MemoryEstimate:
        """Evaluate the telling stages and take the worst."""
        stages = telling_stages(self._s.model, self._x)
        parts = [self._stage(stage) for stage in stages]
        device = [reduce(np.add, (part[name] for name in CATEGORIES)) for part in parts]
        tensors = [
            reduce(np.add, (part[name] for name in CATEGORIES if name not in {"communication", "reserve"}))
            for part in parts
        ]
        peaks = np.broadcast_arrays(*(np.where(s.exists, d, 0.0) for s, d in zip(stages, device, strict=True)))
        peak = np.maximum(np.maximum(peaks[0], peaks[1]), peaks[2])
        worst = np.where(peaks[0] == peak, 0, np.where(peaks[1] == peak, 1, 2))
        allocated = reduce(np.maximum, (np.where(s.exists, t, 0.0) for s, t in zip(stages, tensors, strict=True)))
        rank = np.choose(worst, [np.broadcast_to(s.rank, worst.shape) for s in stages])
        return MemoryEstimate(
            peak_bytes=peak,
            allocated_bytes=np.broadcast_to(allocated, peak.shape),
            stages=tuple(parts),
            worst=worst,
            worst_rank=rank,
            host_bytes=reduce(np.maximum, (self._host(stage) for stage in stages)),
        )

    def _stage(self, stage: Stage) -> dict[str, Column]:
        """Categories of one rank at the moment of its peak."""
        activations, transient = self._activations(stage), self._transient(stage)
        slices = self._swap_slices(stage)
        steps = slices > activations + transient
        parts = {
            "weights": self._weights(stage),
            "gradients": self._gradients(stage),
            "main_weights": self._main_weights(stage),
            "optimizer": self._optimizer(stage),
            "activations": np.where(steps, 0.0, activations),
            "transient": np.where(steps, slices, transient),
            "pipeline_buffers": self._pipeline_buffers(),
            "communication": self._communication(),
        }
        tensors = reduce(np.add, (parts[name] for name in CATEGORIES[:7]))
        parts["reserve"] = self._s.cluster.device.context_bytes + self._s.calibration.fragmentation * tensors
        return parts

    def dense_parameters(self, stage: Stage) -> Column:
        """Elements that all dp x cp ranks hold alike."""
        p = self._params
        ends = stage.has_embedding * p.embedding + stage.has_head * p.head
        return stage.total(p.dense_layer, p.moe_layer) + ends

    def expert_parameters(self, stage: Stage) -> Column:
        """Elements of routed experts."""
        return stage.moe_layers * self._params.experts

    def sharded_parameters(self, stage: Stage) -> Column:
        """Elements that this rank's optimizer updates."""
        return self.dense_parameters(stage) / self._shard + self.expert_parameters(stage) / self._expert_shard

    def _whole(self, stage: Stage) -> Column:
        return self.dense_parameters(stage) + self.expert_parameters(stage)

    def _weights(self, stage: Stage) -> Column:
        """ZeRO 0-2: whole. ZeRO-3: the shard is the main weight; swapped out, a low-precision shard stays."""
        numbers = self._s.workload.numbers
        left = self.sharded_parameters(stage) * numbers.weight_bytes
        kept = np.where(self._x.swap_optimizer == 1, left, 0.0) if numbers.main_weight_bytes else left
        return np.where(self._x.zero == 3, kept, self._whole(stage) * numbers.weight_bytes)

    def _main_weights(self, stage: Stage) -> Column:
        """Full precision: ZeRO-1 and 2 keep a shard beside the gathered weights, ZeRO 0 and 3 need no second copy."""
        numbers = self._s.workload.numbers
        if numbers.main_weight_bytes:
            on_device = np.where(self._x.swap_optimizer == 1, 0.0, numbers.main_weight_bytes)
            return self.sharded_parameters(stage) * on_device
        gathers = (self._x.zero == 1) | (self._x.zero == 2)
        dense = np.where(self._shard > 1, self.dense_parameters(stage) / self._shard, 0.0)
        experts = np.where(self._expert_shard > 1, self.expert_parameters(stage) / self._expert_shard, 0.0)
        return np.where(gathers, (dense + experts) * numbers.weight_bytes, 0.0)

    def _optimizer(self, stage: Stage) -> Column:
        on_device = np.where(self._x.swap_optimizer == 1, 0.0, self._s.workload.optimizer_state_bytes)
        return self.sharded_parameters(stage) * on_device

    def _gradient_bytes(self) -> int:
        numbers = self._s.workload.numbers
        return self._s.stack.gradient_bytes if numbers.main_weight_bytes else numbers.weight_bytes

    def _shards_gradients(self) -> Column:
        """Whether gradients are sharded at the peak. Reduced after the last micro batch, they are whole until then."""
        if self._s.stack.whole_gradients:
            return np.zeros_like(self._x.zero, dtype=bool)
        at_once = (self._x.reduce_gradients == EVERY) | (self._x.accumulation == 1)
        return (self._x.zero >= 2) & at_once

    def _gradients(self, stage: Stage) -> Column:
        elements = np.where(self._shards_gradients(), self.sharded_parameters(stage), self._whole(stage))
        return elements * self._gradient_bytes()

    def _layer_parameters(self, stage: Stage) -> Column:
        """Elements of the largest layer of the stage, gathered."""
        p = self._params
        moe = np.where(stage.moe_layers > 0, p.moe_layer + p.experts, 0.0)
        return np.maximum(np.where(stage.dense_layers > 0, p.dense_layer, 0.0), moe)

    def _transient(self, stage: Stage) -> Column:
        """Gathered weights, gradient buckets, the working set of one layer, and the logits of the last stage."""
        return self._gathered(stage) + self._buckets(stage) + self._working_set(stage) + self._loss(stage)

    def _gathered(self, stage: Stage) -> Column:
        """ZeRO-3: the layer in use and the one on its way (embedding and head are units of their own)."""
        layer, p = self._layer_parameters(stage), self._params
        ends = np.maximum(stage.has_embedding * p.embedding, stage.has_head * p.head)
        shard = np.where(self._x.swap_optimizer == 1, self.sharded_parameters(stage), 0.0)
        alive = np.minimum(layer + np.maximum(layer, ends), self._whole(stage) - shard)
        return np.where(self._x.zero == 3, alive * self._s.workload.numbers.weight_bytes, 0.0)

    def _buckets(self, stage: Stage) -> Column:
        """Reduction copies a layer in full precision; where gradients are sharded, two layers' are whole at a time."""
        layer, size = self._layer_parameters(stage), self._gradient_bytes()
        copy = np.where(self._x.dp * self._x.cp > 1, layer * size, 0.0)
        not_sharded = (self._whole(stage) - self.sharded_parameters(stage)) * size
        return copy + np.where(self._shards_gradients(), np.minimum(2 * layer * size, not_sharded), 0.0)

    def _loss(self, stage: Stage) -> Column:
        """Logits of a chunk with their full-precision copy and gradient; the kept part of unchunked ones is saved."""
        stack, x = self._s.stack, self._x
        tokens = x.micro_batch * float(self._s.workload.seq_len) / x.cp
        chunk = np.minimum(tokens, stack.loss_chunk_tokens) if stack.loss_chunk_tokens else tokens
        each = stack.logits_bytes - (0 if stack.loss_chunk_tokens else 4)
        vocab = padded_vocab(self._s.model.vocab_size, x.tp.astype(float)) / x.tp
        return stage.has_head * chunk * vocab * each

    def _working_set(self, stage: Stage) -> Column:
        """What one layer's backward holds for a moment: gathered inputs, the widest gradients, redone tensors."""
        full = self._x.micro_batch * float(self._s.workload.seq_len) / self._x.cp
        width = self._s.workload.numbers.activation_bytes
        hidden = full * self._s.model.hidden_dim * width
        wide = reduce(np.maximum, (_widest(ops) for ops in (self._dense, self._moe) if ops))
        return 2 * hidden + 2 * wide + self._redone(stage)

    def _redone(self, stage: Stage) -> Column:
        """Recomputed tensors of one layer, less what later layers of the stage have freed by then."""
        layer = self._mean_layer(stage, frozenset())
        selective = layer - self._mean_layer(stage, self._s.stack.selective)
        per_stage = layers_per_virtual_stage(self._s.model, self._x)
        freed = np.where(self._x.recompute_layers > 0, (per_stage - self._x.recompute_layers) * layer, 0.0)
        full = np.maximum(layer - freed, 0.0)
        return np.where(self._x.recompute == FULL, full, np.where(self._x.recompute == SELECTIVE, selective, 0.0))

    def _mean_layer(self, stage: Stage, redone: frozenset[str]) -> Column:
        """Saved bytes of a layer, the mean of the stage's kinds."""
        dense, moe = saved_bytes(self._dense, redone), saved_bytes(self._moe, redone)
        return stage.total(np.asarray(dense), np.asarray(moe)) / np.maximum(stage.layers, 1)

    def kept_per_layer(self, stage: Stage) -> Column:
        """Bytes that a layer keeps in flight under the layout's recomputation, the mean of the virtual stage."""
        x = self._x
        none = self._mean_layer(stage, frozenset())
        selective = self._mean_layer(stage, self._s.stack.selective)
        checkpoint = _named(self._dense or self._moe, "attention_norm_input")
        per_stage = layers_per_virtual_stage(self._s.model, x)
        share = np.where(x.recompute_layers > 0, np.minimum(x.recompute_layers / per_stage, 1.0), 1.0)
        full = share * checkpoint + (1.0 - share) * none
        return np.where(x.recompute == FULL, full, np.where(x.recompute == SELECTIVE, selective, none))

    def _in_flight(self, stage: Stage) -> tuple[Column, Column]:
        """Layers whose activations are alive at the peak, and micro batches alive at the stage's end."""
        x = self._x
        chunks = live_chunks(x.schedule, x.pp, x.vpp, x.accumulation, np.clip(stage.rank, 0, x.pp - 1))
        return chunks * stage.layers / x.vpp, np.ceil(chunks / x.vpp)

    def _live(self, stage: Stage) -> Column:
        """All activations in flight, on the device or off it."""
        layers, micro_batches = self._in_flight(stage)
        embedding = stage.has_embedding * np.asarray(saved_bytes(self._embedding))
        # The last stage turns a micro batch around at once: one set of logits; GPipe keeps what it has not yet turned.
        head = stage.has_head * np.asarray(saved_bytes(self._head))
        return layers * self.kept_per_layer(stage) + micro_batches * (embedding + head)

    def _activations(self, stage: Stage) -> Column:
        live = self._live(stage)
        window = _OFFLOAD_WINDOW * self.kept_per_layer(stage)
        return np.where(self._x.activation_offload == 1, np.minimum(live, window), live)

    def _swap_slices(self, stage: Stage) -> Column:
        numbers = self._s.workload.numbers
        each = self._s.workload.optimizer_state_bytes + numbers.main_weight_bytes
        return np.where(self._x.swap_optimizer == 1, 2.0 / SWAP_SLICES * each * self.sharded_parameters(stage), 0.0)

    def _host(self, stage: Stage) -> Column:
        """Bytes in host memory: main weights and moments, activations in flight."""
        numbers = self._s.workload.numbers
        each = self._s.workload.optimizer_state_bytes + numbers.main_weight_bytes
        swapped = np.where(self._x.swap_optimizer == 1, each * self.sharded_parameters(stage), 0.0)
        offloaded = np.where(self._x.activation_offload == 1, self._live(stage) - self._activations(stage), 0.0)
        return swapped + offloaded

    def _pipeline_buffers(self) -> Column:
        return np.where(self._x.pp > 1, _PIPELINE_BUFFERS * boundary_bytes(self._s, self._x), 0.0)

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
        groups += [x.ep, np.where(x.ep > 1, x.tp * x.cp * x.dp // np.maximum(x.ep, 1), 1)]
    return tuple(groups)


def boundary_bytes(setting: Setting, layouts: Layouts) -> Column:
    """One micro batch's activations at a stage boundary; sequence parallelism sends each rank's part only."""
    tokens = layouts.micro_batch * float(setting.workload.seq_len) / layouts.cp
    own = np.where(layouts.sp == 1, tokens / layouts.tp, tokens)
    return own * setting.model.hidden_dim * setting.workload.numbers.activation_bytes


def _named(operators: tuple[Operator, ...], name: str) -> Column:
    """Bytes of a saved tensor of the table."""
    found: list[Saved] = [s for op in operators for s in op.saved if s.name == name]
    return found[0].n_bytes


def _widest(operators: tuple[Operator, ...]) -> Column:
    """The largest tensor pair of a layer: what the MLP's activation reads."""
    return reduce(np.maximum, (s.n_bytes for op in operators for s in op.saved if s.name.endswith("_up")))
