"""What a pipeline rank's peak is at the least and at the most, for a search: far fewer columns than all its moments.

The least is the last layer's backward alone, one of the moments. The most puts the largest activations, gradients and
transient bytes of all moments together, whether or not they meet.
"""

from __future__ import annotations

from functools import cached_property, reduce
from typing import TYPE_CHECKING

import numpy as np

from cost_models.stage_activations import OFFLOAD_WINDOW
from cost_models.stage_states import FP32_BYTES

if TYPE_CHECKING:
    from cost_models.layer_backward import LayerBackward
    from cost_models.layout import Column
    from cost_models.stage_moments import StageMoments


class StageBounds:
    """Bounds of one rank's fullest moment, beside what lives through the whole step."""

    def __init__(self, moments: StageMoments) -> None:
        rank, self._moments = moments.rank, moments
        self._s, self._x, self._parts, self._stage = rank.setting, rank.layouts, rank.parts, rank.stage
        self._states, self._kept = rank.states, rank.kept
        self._units, self._every = moments.units.units, moments.units.every

    @cached_property
    def least(self) -> Column:
        """The last layer's backward, with most in flight or with all gradients, if nothing is being reduced."""
        kept, moments = self._kept, self._moments
        offloads = self._x.activation_offload == 1
        window = np.where(offloads, np.clip(kept.longest - 1, 0, 1), 2.0)
        top = np.where(kept.split, kept.longest - 1, 1.0)
        # Where weight gradients come later, the first layer instead: all that waits is there.
        brought = offloads & ~(kept.split & (kept.longest > 1))
        layer = np.where(brought, self._layer(fetched=True), self._layer(fetched=False)) - kept.head
        if np.any(kept.split):
            layer = layer + np.where(kept.split, self._grown, 0.0)
            # The first layer gathers no next one.
            part, experts = self._states.top_layer
            next_ = np.maximum(part, experts) * float(self._states.weight_bytes)
            layer = layer - np.where(kept.split & (self._x.zero == 3), next_, 0.0)
        head = np.where(self._units, self._states.weight_bytes * self._states.ends[1], 0.0)
        found = []
        for at in (kept.fullest, kept.steady):
            weights = moments.units.gathered_at(at) - head
            activations = kept.on_device(at.chunks, kept.waiting, window=window, top=top)
            gradients = moments.units.gradients(at) - np.where(self._units, FP32_BYTES * self._states.ends[1], 0.0)
            # Its layer gathers the next one too.
            there = np.where((at.chunks > 0) & ~moments.units.gathers_alone(at), -kept.unsent(at.over), -np.inf)
            found.append((activations + there + layer) + (weights + gradients))
        return np.maximum(*found)

    def _layer(self, *, fetched: bool) -> Column:
        """The fullest instant of the last layer under ZeRO-0, ZeRO-1 and 2, and ZeRO-3, less what it kept."""
        if self._s.model.moe is None or self._s.model.dense_layers:
            dense = self._of_kind(sparse=False, fetched=fetched)
            if self._s.model.moe is None:
                return dense
            return np.where(self._stage.moe_layers > 0, self._of_kind(sparse=True, fetched=fetched), dense)
        return self._of_kind(sparse=True, fetched=fetched)

    def _of_kind(self, *, sparse: bool, fetched: bool) -> Column:
        kept, parts, x = self._kept, self._parts, self._x
        plain = parts.backward("none", sparse=sparse)
        none = self._by_zero(plain, fetched=fetched)
        if not np.any(x.recompute):
            return none if fetched else none - plain.saved
        lean = parts.backward("selective", sparse=sparse)
        selective = self._by_zero(lean, fetched=fetched)
        # Recomputed in part, the last layer keeps all; recomputed, it is made again as a whole.
        whole = none if not fetched else self._by_zero(plain, fetched=False)
        full = np.where(kept.in_part, none, whole)
        if fetched:
            return kept.by_recompute(none, selective, full)
        # The last layer keeps all where a virtual stage is recomputed in part; below it is one that is made again.
        full = np.where(kept.in_part, none - plain.saved, full - kept.checkpoint)
        return kept.by_recompute(none - plain.saved, selective - lean.saved, full)

    def _by_zero(self, layer: LayerBackward, *, fetched: bool) -> Column:
        """Each way to shard is followed through the instants once, in the shape of the rows."""
        zero, kept = self._x.zero, self._kept
        width = float(self._states.weight_bytes)
        part, experts = self._states.top_layer
        before = np.where(kept.longest > 1, part, 0.0)
        next_ = np.where(experts > 0, experts, before)
        gathered = {"layer": part + next_, "experts": part + experts + before, "behind": part + before}
        found: list[list[Column]] = [[], [], []]
        fused = self._s.stack.fused_accumulation
        for instant in layer.instants:
            here = (instant.fetched if fetched else instant.alive) + np.where(kept.split, instant.waiting, 0.0)
            one, all_ = (
                np.where(kept.split, 0.0, 0.0 if fused else elements * width)
                for elements in (instant.making, instant.made)
            )
            found[0].append(here + one)
            found[1].append(here + (all_ if self._s.stack.fsdp else one))
            found[2].append(found[1][-1] + gathered[instant.unit] * width)
        replicated, sharded, third = (reduce(np.maximum, each) for each in found)
        return np.where(zero == 0, replicated, np.where(zero == 3, third, sharded))

    @cached_property
    def most(self) -> Column:
        """All parts at their highest."""
        return self._most_activations + (self._most_transient + self._most_states)

    @cached_property
    def _grown(self) -> Column:
        """Where weight gradients come later: what waits for those of the layers above the first."""
        kept, x = self._kept, self._x
        above = kept.longest - 1
        return above * kept.deferred - np.where(x.activation_offload == 1, 0.0, kept.from_top(above))

    @cached_property
    def _most_activations(self) -> Column:
        kept = self._kept
        chunks, waiting = np.maximum(kept.chunks, kept.late[0]), np.maximum(kept.waiting, kept.late[1])
        return kept.on_device(chunks, waiting, window=np.where(self._one_by_one, OFFLOAD_WINDOW, kept.window))

    @cached_property
    def _one_by_one(self) -> Column:
        """Whether layers of several virtual stages leave for the host one after another."""
        return (self._x.activation_offload == 1) & (self._kept.longest == 1)

    @cached_property
    def _most_states(self) -> Column:
        """Gradients and gathered weights."""
        states, x = self._states, self._x
        if not self._s.stack.fsdp:
            return np.zeros_like(self._parts.shard, dtype=float)
        whole = states.whole_parameters * float(states.gradient_bytes)
        sharded = states.sharded_parameters * float(FP32_BYTES)
        gradients = np.where((x.accumulation > 1) & ~self._every, np.maximum(whole, sharded), sharded)
        alone = np.where(states.lasting_gradients == 0, whole, 0.0)
        whole = np.where(self._units, gradients + self._moments.units.pending_head, alone)
        return whole + self._moments.units.gathered

    @cached_property
    def _most_transient(self) -> Column:
        """The highest of all but the warm-up's forwards, and these."""
        if not np.any(self._one_by_one):
            return self._most_of_others
        return reduce(np.maximum, (self._most_of_others, *(m.transient for m in self._moments.ends.warm_up)))

    @cached_property
    def _most_of_others(self) -> Column:
        """The highest of a layer beside the copy of a unit, the ends of the model, and ZeRO-3's forward."""
        kept, states, moments = self._kept, self._states, self._moments
        width = float(states.weight_bytes)
        embedding, head = states.ends
        layer = np.maximum(self._layer(fetched=False), self._layer(fetched=True))
        # Layers are counted by their mean where some of them are recomputed: one may keep all.
        whole = self._parts.backward("none", sparse=bool(self._parts.moe)).saved
        layer = layer + np.where(self._x.recompute_layers > 0, whole, 0.0)
        look_up = kept.own + kept.again + kept.full + embedding * width
        loss = moments.ends.logits + kept.again + kept.full + kept.own + moments.ends.head_norm_scratch
        plain = self._parts.backward("none", sparse=bool(self._parts.moe))
        if not self._s.stack.fsdp:
            return reduce(
                np.maximum,
                (layer + np.where(kept.split, np.maximum(self._grown, 0.0), 0.0), look_up, loss, plain.product),
            )
        part, experts = states.top_layer
        shard = float(FP32_BYTES) / self._parts.shard
        expert_shard = float(FP32_BYTES) / self._parts.expert_shard
        # Beside a copy: what it is reduced to, twice where a single rank divides it, and tensors put together again.
        copies = reduce(
            np.maximum,
            (
                np.maximum(part, head) * (FP32_BYTES + 2 * shard),
                experts * (FP32_BYTES + 2 * expert_shard + max(FP32_BYTES, width) / 2),
            ),
        )
        end = embedding * (FP32_BYTES + 2 * shard + max(FP32_BYTES, width))
        units = np.maximum(layer + copies, np.maximum(end, look_up + part * float(FP32_BYTES)) + kept.own)
        gather = (3 * experts + 2 * part + 2 * np.maximum(head, embedding)) * width + 2 * kept.own
        forward = gather + plain.running + plain.product
        third = np.where(self._x.zero == 3, np.maximum(gather + plain.saved * (experts > 0), forward), 0.0)
        first = np.where(self._x.zero == 3, 2.0, 1.0) * (head + np.maximum(part, experts)) * width + kept.own
        found = reduce(np.maximum, (units, third, loss + 2 * head * width, first + (part + experts) * width))
        # Later weight gradients: in the model's precision or in full, and beside copies where they are reduced at once.
        chunk = states.whole_parameters / self._x.vpp + embedding + head
        made = chunk * float(max(states.gradient_bytes, states.weight_bytes)) + np.maximum(copies, end)
        here = layer + head * float(FP32_BYTES) + np.maximum(self._grown, 0.0)
        found = np.where(kept.split, np.maximum(found, np.maximum(made, here)), found)
        alone = reduce(np.maximum, (layer + np.where(kept.split, np.maximum(self._grown, 0.0), 0.0), look_up, loss))
        return np.where(self._units, found, alone)
