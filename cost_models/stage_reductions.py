"""Moments of reducing gradients on a pipeline rank: ends of units, layers between them, late weight gradients."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cost_models.schedules import ZB_V
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
        earlier = at.earlier
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
        ) -> Moment:
            """With so many elements and layers of units that are through; `now` are those whose unit ends.

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
                - kept.head,
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
        has_head, has_embedding = (
            np.where(there_ > 0, 0.0, NEVER) for there_ in (self._stage.has_head, self._stage.has_embedding)
        )
        two, three = (np.where(per_stage >= n, 0.0, NEVER) for n in (2, 3))
        second, first = (self._layers.below("layer", gone) for gone in (np.asarray(1.0), per_stage - 2))
        # All layers of the virtual stage but the first and another, which still gathers the first.
        most = head + (per_stage - 2) * layer, (per_stage - 2) * experts
        rest = states.dense_parameters - embedding, states.expert_parameters
        found = [
            moment(
                "end of head",
                nothing,
                nothing,
                0.0,
                kept.own + ends(head, head, self._u.shards(head, nothing)) + has_head,
                now=head,
            ),
            moment(
                "end of last layer",
                head,
                experts,
                1.0,
                kept.own + ends(layer, self._states.last_tensor, self._u.shards(layer, nothing)),
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
            again = self._layers.behind("layer", fetched=False, again=True) + np.where(kept.in_part, 0.0, NEVER)
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
        chunks = np.maximum(kept.steady.chunks, kept.last.chunks)
        activations = kept.on_device(chunks, gone=kept.per_virtual_stage) - kept.head

        def moment(name: str, at: InFlight, there: Column) -> Moment:
            return Moment(
                name=name,
                weights=self._u.gathered_at(at),
                gradients=self._u.gradients(at),
                activations=activations,
                transient=self._ends.look_up + there,
            )

        found = [moment("embedding, accumulated", kept.over, there)]
        if np.any(kept.split & self._u.every):
            first = np.where(kept.split & self._u.every, there, NEVER)
            found.append(moment("embedding, first of its gradients", kept.before_all(kept.over), first))
        return found

    @cached_property
    def split(self) -> list[Moment]:
        """Backward in two parts: the second makes the weight gradients of a virtual stage at once."""
        kept, states, x = self._kept, self._states, self._x
        chunks = kept.fullest.chunks
        there = np.where(kept.split, 0.0, NEVER)
        dense = (states.dense_parameters - self._u.head - self._u.embedding) / x.vpp
        experts = states.expert_parameters / x.vpp
        ends = np.maximum(self._u.head, self._u.embedding)
        whole = (dense + experts + ends) * float(states.gradient_bytes)
        # Of a single virtual stage the head's gradient waits all the time; of several, this may be another one.
        waits = np.where(x.vpp == 1, self._u.pending_head, 0.0)
        whole = np.maximum(whole - waits, 0.0)
        # Gradients of a virtual stage in the precision of the model become full ones, or are added to these. In full
        # precision each is added at once.
        alike = self._s.workload.numbers.main_weight_bytes == 0
        low = self._u.computed(np.maximum(self._u.layer, self._u.experts) if alike else dense + experts)
        made = np.where(self._u.units, low, 0.0)
        wide = np.where(self._u.units, whole, 0.0)
        alone = self._u.every | (x.accumulation == 1)

        def moment(
            name: str,
            at: InFlight,
            activations: Column,
            transient: Column,
            gone: Column | float = 0.0,
            weights: Column | None = None,
        ) -> Moment:
            there_are = self._u.gathered_at(at) if weights is None else weights
            return Moment(
                name=name,
                weights=there_are - np.where(self._u.gathered > 0, gone, 0.0),
                gradients=self._u.settled(at) + waits,
                activations=activations,
                transient=transient + there,
            )

        many = np.where(x.accumulation > 1, 0.0, NEVER)
        before = InFlight(chunks, 0.0 * kept.share, np.asarray(False), 0.0 * kept.share)
        # Later, as many others are there as the step still has.
        rest = np.maximum(x.accumulation * x.vpp - 2, 0)
        left = np.clip(chunks - 1, 0, rest)
        late = np.clip(kept.waiting, 0, rest - left)

        def behind(chunks: Column, waiting: Column) -> Column:
            """What others keep; no loss is among them, whose backward follows at once."""
            there = kept.on_device(chunks, waiting, window=0.0)
            return there - kept.head * np.minimum(chunks, 1)

        start, later = behind(chunks - 1, kept.waiting), behind(left, late)
        grown = np.where(alone, np.maximum(made, wide), made)
        copy, freed = self._first_copies(wide)
        found = [
            moment("weight gradients", before, start, np.maximum(made, wide)),
            moment("weight gradients, later", kept.over, later, grown + many),
            moment("end of virtual stage", before, start, wide + copy + np.where(alone, 0.0, NEVER), freed),
            moment("end of another", kept.over, later, grown * alone + copy + many, freed),
        ]
        if np.any(x.vpp > 1):
            over, rest = np.where(x.vpp > 1, 0.0, NEVER), behind(0.0 * chunks, 0.0 * chunks)
            final = grown * alone + copy + over
            found.append(moment("end of the last", kept.final, rest, final, freed, self._u.gathered_of_last))
        if np.any(self._u.every & (x.vpp > 1)):
            first, only = kept.before_all(kept.over), np.where(self._u.every & (x.vpp > 1), many, NEVER)
            found += [
                moment("weight gradients, first of theirs", first, later, grown + only),
                moment("end of first of theirs", first, later, grown + copy + only, freed),
            ]
        if np.any(x.schedule == ZB_V):
            # At the end of a fold's step many others wait, which no offload takes.
            in_flight, others = kept.late
            put_off = behind(np.maximum(in_flight - 1, 0), others)
            some = np.where((x.schedule == ZB_V) & (others > 0), many, NEVER)
            each_time = np.where(alone, some, NEVER)
            found += [
                moment("weight gradients, put off", kept.over, put_off, grown + some, weights=self._u.gathered),
                moment("end of one put off", kept.over, put_off, grown + copy + each_time, freed, self._u.gathered),
            ]
        return found

    def _first_copies(self, wide: Column) -> tuple[Column, Column]:
        """What is there beside all gradients of a virtual stage as the fullest of its units is reduced, and freed.

        Units go from the embedding to the head: embedding, first layer, its experts, and the others like these.
        """
        units, none = self._u, 0.0 * self._u.layer
        full = units.copied
        last = units.experts / (3.0 if self._s.model.gated_mlp else 2.0)
        # Cut along another axis each tensor is put together again, and the last one is there twice.
        turned = np.where(self._states.experts_turned, full(last), 0.0)
        # Of the gradients that the copy was made of the last one lies beside what the copy is reduced to.
        layer = (units.layer, units.shards(units.layer, none), self._states.last_tensor, 0.0 * turned)
        experts = (units.experts, units.shards(none, units.experts), last, turned)
        embedding = (units.embedding, units.shards(units.embedding, none), units.embedding, 0.0 * turned)
        found = [(full(2 * units.head) - wide, none)]
        # Virtual stages without the embedding, of several, have the head at the most.
        others = np.where((self._x.vpp > 1) | (units.embedding == 0), 0.0, NEVER)
        others = others - full(np.maximum(units.embedding - units.head, 0.0))
        for sequence, start in (((embedding, layer, experts), none), ((layer, experts), others)):
            gone, shards = none, none
            for unit, shard, last, again in sequence:
                alone = np.where(shard >= full(unit), shard, 0.0)  # a single rank divides its copy into another one
                into = np.maximum(alone, shard - full(np.maximum(unit - last, 0.0)))
                freed = np.where(units.third, 0.0, units.computed(gone + unit))
                here = full(unit) - full(gone) + shards + np.maximum(into, 0.0) + again + start
                found.append((np.where(unit > 0, here, NEVER), freed))
                gone, shards = gone + unit, shards + shard
        copy, most = found[0]
        for transient, freed in found[1:]:
            better = transient - freed > copy - most
            copy, most = np.where(better, transient, copy), np.where(better, freed, most)
        return copy, most
