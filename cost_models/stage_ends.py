"""Moments at the ends of a pipeline rank's part of the model, and of gathering weights in forward."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cost_models.operators import padded_vocab
from cost_models.schedules import GPIPE
from cost_models.stage_activations import OFFLOAD_WINDOW, InFlight
from cost_models.stage_states import FP32_BYTES
from cost_models.stage_units import NEVER, Moment, Pass

if TYPE_CHECKING:
    from cost_models.layout import Column
    from cost_models.stage_layers import StageLayers
    from cost_models.stage_units import StageUnits


class StageEnds:
    """Loss, final norm, look-up, and FSDP's gathers."""

    def __init__(self, units: StageUnits, layers: StageLayers) -> None:
        rank, self._u, self._layers = units.rank, units, layers
        self._s, self._x, self._parts, self._stage = rank.setting, rank.layouts, rank.parts, rank.stage
        self._states, self._kept = rank.states, rank.kept

    def loss(self, at: Pass, *, window: Column | None = None) -> Moment:
        """The loss of a chunk of tokens."""
        kept, head = self._kept, self._u.computed(self._u.head)
        # A table that is shared is there already: the last layer's buffer waits instead.
        last = self._u.computed(np.where(self._u.experts > 0, self._u.experts, self._u.layer))
        waiting = np.where(kept.shares_table, last, head)
        # FSDP holds the buffer of a gather until the next one's is there; none comes after the head's.
        waits = (self._x.schedule != GPIPE) | (self._x.accumulation == 1)
        buffer = np.where(self._u.units & (self._u.third | (waits & ~at.earlier)), waiting, 0.0)
        gathered = np.where(self._u.units & self._u.third, head, 0.0)
        # The norm's output, gathered, and the gradient of that, which is counted as kept once it is scattered.
        scratch = self.logits + kept.again + kept.full
        there = np.where((self._stage.has_head > 0) & self.runs_forward(at), 0.0, NEVER)
        return Moment(
            name="loss",
            weights=at.weights,
            gradients=self._u.gradients(at.at),
            activations=kept.on_device(at.chunks, at.waiting, window=window, forward=True),
            transient=buffer + gathered + scratch + there + at.there,
        )

    def runs_forward(self, at: Pass) -> Column:
        """Whether forwards run between this backward and the one before: GPipe runs all of them first."""
        return np.asarray((self._x.schedule != GPIPE) | ~at.earlier)

    @cached_property
    def logits(self) -> Column:
        """Logits of a chunk with what is made of them; the kept part of unchunked ones is saved."""
        stack, x = self._s.stack, self._x
        tokens = x.micro_batch * float(self._s.workload.seq_len) / x.cp
        chunk = np.minimum(tokens, stack.loss_chunk_tokens) if stack.loss_chunk_tokens else tokens
        width = self._s.workload.numbers.activation_bytes
        chunked = FP32_BYTES + width if width < FP32_BYTES else FP32_BYTES
        each = chunked if stack.loss_chunk_tokens else stack.logits_bytes - FP32_BYTES
        vocab = padded_vocab(self._s.model.vocab_size, x.tp.astype(float)) / x.tp
        return self._stage.has_head * chunk * vocab * each

    @property
    def head_norm_scratch(self) -> Column:
        """Of the final norm's backward."""
        return self._parts.follower.norm_scratch(self._kept.own)

    def head_norm(self, at: Pass) -> Moment:
        """The final norm's backward."""
        kept = self._kept
        there = np.where(self._stage.has_head > 0, 0.0, NEVER)
        # The head's weights stay from forward to backward; GPipe's later backwards gather them again.
        forward = self.runs_forward(at)
        copies = np.where(forward, 1.0, 2.0)
        return Moment(
            name="final norm",
            weights=at.weights,
            gradients=self._u.gradients(at.at),
            activations=kept.on_device(at.chunks, at.waiting, window=np.where(forward, kept.window, 0.0)),
            transient=self.head_norm_scratch
            + np.where(self._u.units & self._u.third, copies * self._u.computed(self._u.head), 0.0)
            + there
            + at.there,
        )

    def gathering(self, at: Pass) -> list[Moment]:
        """Units as they are gathered in forward: FSDP holds the buffer of the one before until the new one is there."""
        kept, x = self._kept, self._x
        layer, experts, head, embedding = (
            self._u.computed(e) for e in (self._u.layer, self._u.experts, self._u.head, self._u.embedding)
        )
        sparse = self._u.experts > 0
        # Each use gathers again under ZeRO-3; otherwise the first forward does, which is not a full pipeline's last.
        alone = (x.pp == 1) & ~at.earlier
        gathers = self._u.units & (self._u.third | alone) & self.runs_forward(at)
        there = np.where(gathers, at.there, NEVER)
        last = np.where(sparse, experts, layer)
        before = np.where(sparse, layer, np.where(kept.longest > 1, layer, 0.0))
        turned = np.where(self._states.experts_turned & sparse, experts, 0.0)

        def moment(
            name: str, unit: Column, others: Column, activations: Column, there: Column, later: Column
        ) -> Moment:
            return Moment(
                name=name,
                weights=at.weights - np.where(at.weights > 0, later, 0.0),
                gradients=self._u.gradients(at.at),
                activations=activations,
                transient=unit + others + np.where(self._u.third, unit, 0.0) + there,
            )

        full = kept.on_device(at.chunks, at.waiting, forward=True)
        most = kept.on_device(at.chunks, at.waiting, gone=1.0, forward=True) - kept.head
        less = kept.on_device(np.maximum(at.chunks - 1, 0), at.waiting)
        has_head, has_embedding = (
            np.where(n > 0, 0.0, NEVER) for n in (self._stage.has_head, self._stage.has_embedding)
        )
        dense = np.where(self._u.third & sparse, layer, 0.0)
        # A table that embedding and head share is gathered before all else, as the root of the model.
        has_embedding = np.where(self._u.third & (at.weights > 0), NEVER, has_embedding)
        return [
            moment("gather of last layer", last, before + dense + turned + kept.own, most, there, head),
            moment("gather of head", head, last, full - kept.head + kept.own, there + has_head, 0.0 * head),
            moment("gather of embedding", embedding, 0.0 * head, less, there + has_embedding, 0.0 * head),
        ]

    @cached_property
    def look_up(self) -> Column:
        """Scratch of the embedding's backward."""
        kept = self._kept
        return kept.own + kept.again + np.where(self._x.tp > 1, kept.full, 0.0) + self._u.computed(self._u.embedding)

    def forward(self, at: Pass) -> Moment:
        """The last layer's forward; under ZeRO-3 with its weights beside the buffer that they came in."""
        return self._forward(at, window=self._kept.window)

    def _forward(self, at: Pass, *, window: Column, first: Column | bool = False) -> Moment:
        third, experts = self._u.third, self._u.experts
        last = np.where(experts > 0, experts, self._u.layer)
        # Otherwise the first micro batch's forward gathers all, each unit by a buffer that waits for the next one.
        once = ((self._x.accumulation == 1) | first) & (self._x.pp > 1)
        gathered = np.where(third, self._u.layer + np.where(experts > 0, 2 * experts, self._u.layer), once * last)
        weights = np.where(self._u.units, self._u.computed(gathered), 0.0)
        return Moment(
            name="forward",
            weights=at.weights,
            gradients=self._u.gradients(at.at),
            activations=self._kept.on_device(at.chunks, at.waiting, window=window, forward=True) - self._kept.head,
            transient=self._layers.running + weights + np.where(self.runs_forward(at), at.there, NEVER),
        )

    @cached_property
    def warm_up(self) -> list[Moment]:
        """Forwards before any backward, as the first ones gather: of single layers the one before is still leaving."""
        kept, none, x = self._kept, 0.0 * self._kept.share, self._x
        one_by_one = (x.activation_offload == 1) & (kept.longest == 1)
        if not np.any(one_by_one | ((x.vpp > 1) & (self._stage.has_head > 0))):
            return []
        at = Pass(
            at=InFlight(kept.chunks, none, np.asarray(0), none),
            waiting=np.asarray(0),
            weights=self._u.gathered,
            reduces=np.asarray(False),
            frees=np.asarray(False),
            there=np.where((kept.chunks > 1) & (x.pp > 1), 0.0, NEVER),
        )
        window = np.where(one_by_one, OFFLOAD_WINDOW, kept.window)
        unsent = kept.unsent(np.asarray(0))
        found = [replace(self.loss(at, window=window), name="first loss", unsent=unsent)]
        if np.any(one_by_one):
            forward = self._forward(
                replace(at, there=np.where(one_by_one, at.there, NEVER)), window=window, first=x.vpp > 1
            )
            found.append(replace(forward, name="forward of the warm-up", unsent=unsent))
        return found

    def forward_again(self, at: Pass) -> Moment:
        """The forward of a layer that is recomputed, while layers that keep all are still leaving for the host."""
        kept, gathers = self._kept, self._u.third & self._u.units
        leaving = kept.in_part & (self._x.activation_offload == 1) & (at.chunks > 1) & ~at.earlier
        weights = np.where(gathers, self._u.computed(2 * self._u.layer), 0.0)
        return Moment(
            name="forward of a recomputed layer",
            weights=at.weights,
            gradients=self._u.gradients(at.at),
            activations=kept.on_device(at.chunks, at.waiting, forward=True) - kept.head,
            transient=self._layers.running_again + weights + np.where(leaving, at.there, NEVER),
        )
