"""Moments of weight gradients that come later than those of inputs: a virtual stage's are made at once."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cost_models.schedules import ZB_V
from cost_models.stage_activations import InFlight
from cost_models.stage_units import NEVER, Moment

if TYPE_CHECKING:
    from cost_models.layout import Column
    from cost_models.stage_units import StageUnits


class StageLateGradients:
    """The second part of a split backward."""

    def __init__(self, units: StageUnits) -> None:
        rank, self._u = units.rank, units
        self._s, self._x, self._parts = rank.setting, rank.layouts, rank.parts
        self._states, self._kept = rank.states, rank.kept

    @cached_property
    def moments(self) -> list[Moment]:
        """Candidates for the peak."""
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
