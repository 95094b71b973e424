"""Moments of reducing gradients on a pipeline rank: ends of units, layers between them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cost_models.stage_activations import InFlight
from cost_models.stage_units import NEVER, Moment, all_gradients

if TYPE_CHECKING:
    from cost_models.layout import Column
    from cost_models.stage_ends import StageEnds
    from cost_models.stage_layers import StageLayers
    from cost_models.stage_units import Pass, StageUnits


class StageReductions:
    """Where gradients go."""

    def __init__(self, units: StageUnits, layers: StageLayers, ends: StageEnds) -> None:
        rank, self._u, self._layers, self._ends = units.rank, units, layers, ends
        self._s, self._x, self._parts, self._stage = rank.setting, rank.layouts, rank.parts, rank.stage
        self._states, self._kept = rank.states, rank.kept

    def of_pass(self, at: Pass) -> list[Moment]:
        """Ends of units in a backward that reduces, and layers between them."""
        kept, states = self._kept, self._states
        head, layer, experts, embedding = self._u.head, self._u.layer, self._u.experts, self._u.embedding
        # Whole gradients are there from earlier micro batches, or each unit's are made now.
        earlier = at.earlier & (self._x.accumulation > 1)
        whole = np.where(earlier & ~self._u.every, float(states.gradient_bytes), 0.0)
        made = np.where(whole > 0, 0.0, self._u.computed(1.0))
        freed = np.where(at.frees, self._u.computed(1.0), 0.0)
        there = np.where(self._u.units & at.reduces, at.there, NEVER)
        single = kept.single  # other virtual stages' last backwards are over
        so_far, everything = self._u.gradients(at.at), self._u.gradients(all_gradients(np.where(earlier, 1.0, 0.0)))
        one = np.minimum(at.chunks, 1.0)

        def moment(
            name: str,
            dense: Column,
            sparse: Column,
            layers: Column | float,
            transient: Column,
            *,
            window: Column | None = None,
            now: Column | float = 0.0,
            final: bool = False,
            joined: bool = False,
        ) -> Moment:
            """With so many elements and layers of units that are through; `now` are those whose unit ends.

            `joined`: the head's gradient of a shared table is part of the embedding's.
            `final`: in the virtual stage whose backward comes last, when all others' is over.
            """
            chunks = one if final else at.chunks
            weights = np.where(single & ~at.frees, self._u.gathered_of_last, self._u.gathered) if final else at.weights
            lasting = everything if final else so_far
            new = np.where(earlier & self._u.every, 0.0, self._u.shards(dense, sparse))
            return Moment(
                name=name,
                weights=weights - (dense + sparse + now) * freed,
                gradients=lasting - (dense + sparse) * whole + new,
                activations=kept.on_device(chunks, at.waiting, layers, kept.window if window is None else window)
                - (kept.head if joined else kept.head_behind),
                transient=transient + there,
            )

        def ends(elements: Column, last: Column, shard: Column) -> Column:
            """A unit's gradients beside their copy, or the last of its tensors beside what the copy is reduced to."""
            accumulated = shard - (elements - last) * whole
            # A single rank divides its copy into another one.
            return (
                self._u.copied(elements)
                + np.where(shard >= self._u.copied(elements), shard, 0.0)
                + np.maximum(made * elements, np.where(whole > 0, accumulated, shard + made * last))
            )

        nothing, per_stage = 0.0 * layer, kept.longest
        # The buffer that the next unit came in, under ZeRO-3.
        gathers = self._u.third & ~self._u.gathers_alone(at.at)
        buffers = (
            np.where(gathers, self._u.computed(elements), 0.0)
            for elements in (np.where(experts > 0, experts, layer), np.where(per_stage > 1, layer, 0.0))
        )
        behind_head, behind_layer = buffers
        has_head, has_embedding = (
            np.where(there_ > 0, 0.0, NEVER) for there_ in (self._stage.has_head, self._stage.has_embedding)
        )
        two, three = (np.where(per_stage >= n, 0.0, NEVER) for n in (2, 3))
        second, first = (self._layers.below("layer", gone, at) for gone in (np.asarray(1.0), per_stage - 2))
        # All layers of the virtual stage but the first and another, which still gathers the first.
        most = head + (per_stage - 2) * layer, (per_stage - 2) * experts
        rest = states.dense_parameters - embedding, states.expert_parameters
        found = [
            moment(
                "end of head",
                nothing,
                nothing,
                0.0,
                kept.own + ends(head, head, self._u.shards(head, nothing)) + behind_head + has_head,
                window=np.where(self._ends.runs_forward(at), kept.window, 0.0),
                now=head,
            ),
            moment(
                "end of last layer",
                head,
                experts,
                1.0,
                kept.own + ends(layer, self._states.last_tensor, self._u.shards(layer, nothing)) + behind_layer,
                window=np.clip(per_stage - 1, 0, 1),
                now=layer,
            ),
            moment("second last layer", head + layer, experts, 1.0, second + two, window=np.clip(per_stage - 1, 0, 2)),
            moment("second layer", *most, per_stage - 2, first + three),
            moment(
                "end of embedding",
                *rest,
                per_stage,
                ends(embedding, embedding, self._u.shards(embedding, nothing)) + has_embedding,
                now=embedding,
                final=True,
                joined=True,
            ),
            moment(
                "embedding", *rest, per_stage, self._ends.look_up + self._u.copied(layer) + has_embedding, final=True
            ),
        ]
        if np.any(self._x.vpp > 1):
            all_but = rest[0] - 2 * layer, rest[1] - 2 * experts
            found.append(moment("second layer of the last", *all_but, per_stage - 2, first + three, final=True))
        if np.any(kept.in_part):
            gone = kept.whole_layers
            again = self._layers.behind("layer", at, again=True) + np.where(kept.in_part, 0.0, NEVER)
            found.append(moment("recomputed layer", head + gone * layer, gone * experts, gone, again))
        if np.any(experts):
            last = experts / (3.0 if self._s.model.gated_mlp else 2.0)
            end = ends(experts, last, self._u.shards(nothing, experts))
            end = end + np.where(states.experts_turned, last * np.where(whole > 0, whole, made), 0.0)
            end = end + np.where(self._u.third, self._u.computed(2 * layer), 0.0)
            behind, again = (self._layers.behind_experts(again=again) + end for again in (False, True))
            found.append(
                moment("end of experts", head, nothing, 0.0, behind, window=np.clip(per_stage, 1, 2), now=experts)
            )
            found.append(moment("end of second experts", *most, per_stage - 2, again + three, now=experts))
        return found

    @cached_property
    def between(self) -> list[Moment]:
        """The embedding's backward where gradients are not reduced then."""
        kept = self._kept
        waits = (self._x.accumulation > 1) | ~self._u.units | kept.split
        there = np.where((self._stage.has_embedding > 0) & waits, 0.0, NEVER)
        # Where virtual stages run one after another the one with the embedding is the last that is left.
        chunks = np.where(kept.single, np.minimum(kept.chunks, kept.per_turn), kept.steady.chunks)
        chunks = np.where(kept.single, chunks, np.maximum(chunks, kept.last.chunks))
        activations = kept.on_device(chunks, gone=kept.per_virtual_stage) - kept.head_behind
        over = kept.single & ~kept.split  # the others are through, and their weights are free

        def moment(name: str, at: InFlight, there: Column) -> Moment:
            return Moment(
                name=name,
                weights=np.where(over, self._u.gathered_of_last, self._u.gathered_at(at)),
                gradients=self._u.gradients(at),
                activations=activations,
                transient=self._ends.look_up + there,
                unsent=kept.unsent(kept.final.over),
            )

        found = [moment("embedding, accumulated", kept.over, there)]
        if np.any(kept.split & self._u.every):
            first = np.where(kept.split & self._u.every, there, NEVER)
            found.append(moment("embedding, first of its gradients", kept.before_all(kept.over), first))
        return found
