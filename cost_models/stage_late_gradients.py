"""Moments of weight gradients that come later than those of inputs: a virtual stage's are made at once."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cost_models.pipeline_chunks import left_behind
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
        """Candidates for the peak.

        The more virtual stages have gradients, the fewer are left in flight: the most is where one more takes the first
        away from those in flight, or at one of the ends.
        """
        kept, x = self._kept, self._x
        one = np.ones_like(x.vpp)
        found = self._of_turn(one, np.asarray(True))
        if np.any(x.vpp > 1):
            for turn in (kept.full_rounds, kept.full_rounds + 1, x.vpp):
                there = (x.vpp > 1) & (turn > 1) & (turn <= x.vpp)
                found += self._of_turn(np.clip(turn, 1, x.vpp), there)
            if np.any(x.accumulation > kept.per_turn):
                more = (x.vpp > 1) & (x.accumulation > kept.per_turn)
                found += self._again(one, x.vpp * kept.per_turn, more)
            found += self._ends_of_all
        return found + self._put_off if np.any(x.schedule == ZB_V) else found

    def _of_turn(self, turn: Column, there: Column) -> list[Moment]:
        """The virtual stage that is such a one in backward: its first weight gradients, and the next ones."""
        per_turn = self._kept.per_turn
        before = (turn - 1) * per_turn
        several = (per_turn > 1) | ((turn == self._x.vpp) & (self._x.accumulation > per_turn))
        found = self._again(turn, before + 1, there & several)
        wide = np.maximum(self._low, self._whole(turn))
        copy, freed = self._first_copies(wide, turn)
        at = self._kept.after(before + self._kept.waiting, self._kept.chunks)
        weights, others = self._gathered_in(turn, at, again=False), self._others_behind(before)
        here = np.where(there, 0.0, NEVER)
        each_time = np.where(self._alone, here, NEVER)
        found.append(self._moment("weight gradients", at, others, wide + here, weights))
        found.append(self._moment("end of weight gradients", at, others, wide + copy + each_time, weights, freed))
        return found

    def _again(self, turn: Column, over: Column, there: Column) -> list[Moment]:
        """The same virtual stage's next ones, as so many weight gradients are over."""
        wide = np.maximum(self._low, self._whole(turn))
        copy, freed = self._first_copies(wide, turn)
        at, others = self._kept.after(over + self._kept.waiting, self._kept.chunks), self._others_behind(over)
        grown = np.where(self._alone, wide, self._low)
        here = np.where(there, 0.0, NEVER)
        each_time = np.where(self._alone, here, NEVER)
        weights = self._gathered_in(turn, at, again=True)
        return [
            self._moment("weight gradients, again", at, others, grown + here, weights),
            self._moment("end of weight gradients, again", at, others, grown + copy + each_time, weights, freed),
        ]

    @property
    def _ends_of_all(self) -> list[Moment]:
        """The reduction of a virtual stage's gradients, of the first where these are over before the next one's."""
        kept, x = self._kept, self._x
        none = 0.0 * kept.chunks
        single = np.where(kept.single & ~self._alone, 0.0, NEVER)
        last = np.where(x.vpp > 1, 0.0, NEVER)
        one = np.ones_like(x.vpp)
        first_copy, first_freed = self._first_copies(self._whole(one), one)
        wide = np.maximum(self._low, self._whole(x.vpp))
        copy, freed = self._first_copies(wide, x.vpp)
        over = kept.per_turn - 1
        first, others = kept.after(over + kept.waiting, kept.chunks), self._others_behind(over)
        rest, end = self._behind(none, none), wide * self._alone + copy + last
        return [
            self._moment(
                "end of the first", first, others, first_copy + single, self._u.gathered_at(first), first_freed
            ),
            self._moment("end of the last", kept.final, rest, end, self._u.gathered_of_last, freed),
        ]

    @property
    def _put_off(self) -> list[Moment]:
        """At the end of a fold's step many others wait, which no offload takes."""
        kept, x = self._kept, self._x
        in_flight, waiting = kept.late
        others = self._behind(np.maximum(in_flight - 1, 0), waiting)
        some = np.where((x.schedule == ZB_V) & (waiting > 0) & (x.accumulation > 1), 0.0, NEVER)
        each_time, all_ = np.where(self._alone, some, NEVER), self._u.gathered
        found = []
        for turn in (np.ones_like(x.vpp), x.vpp):
            wide = np.maximum(self._low, self._whole(turn))
            copy, freed = self._first_copies(wide, turn)
            grown = np.where(self._alone, wide, self._low)
            found += [
                self._moment("weight gradients, put off", kept.over, others, grown + some, all_),
                self._moment("end of one put off", kept.over, others, grown + copy + each_time, all_, freed),
            ]
        return found

    def _moment(
        self,
        name: str,
        at: InFlight,
        activations: Column,
        transient: Column,
        weights: Column,
        freed: Column | float = 0.0,
    ) -> Moment:
        return Moment(
            name=name,
            weights=weights - np.where(self._u.gathered > 0, freed, 0.0),
            gradients=self._u.settled(at) + self._waits,
            activations=activations,
            transient=transient + np.where(self._kept.split, 0.0, NEVER),
            unsent=self._kept.unsent(at.over + 1),
        )

    def _gathered_in(self, turn: Column, at: InFlight, *, again: bool) -> Column:
        """Gathered weights. Reduced each time, a virtual stage's are free until its next forward.

        In its turn those of the turns before have none, but for one that a long run brings in between.
        """
        u, vpp = self._u, self._x.vpp
        found = u.gathered_at(at)
        each_time = u.units & u.every & (vpp > 1) & ~u.third
        if not np.any(each_time):
            return found
        layers = (self._states.whole_parameters - u.head - u.embedding) / vpp
        head = np.where(turn == 1, u.head, 0.0)
        there = np.maximum(vpp - turn + 1, np.minimum(vpp - 1, 2))
        before = u.computed(there * layers + u.embedding + head)
        mine = u.computed(layers + np.where(turn == vpp, u.embedding, head))
        all_have = at.gradients >= 1
        first = each_time & ~all_have & ((turn < vpp) | (not again))
        return np.where(first, before, np.where(each_time & all_have & (self._x.schedule == ZB_V), mine, found))

    @cached_property
    def _alone(self) -> Column:
        """Whether a virtual stage's weight gradients are reduced each time they are made."""
        return np.asarray(self._u.every | (self._x.accumulation == 1))

    @cached_property
    def _waits(self) -> Column:
        """The head's gradient waits all the time where it has the rank's only virtual stage."""
        return np.where(self._x.vpp == 1, self._u.pending_head, 0.0)

    @cached_property
    def _low(self) -> Column:
        """Gradients of a virtual stage in the precision of the model become full ones, or are added to these.

        In full precision each is added at once.
        """
        states = self._states
        dense = (states.dense_parameters - self._u.head - self._u.embedding) / self._x.vpp
        alike = self._s.workload.numbers.main_weight_bytes == 0
        elements = (
            np.maximum(self._u.layer, self._u.experts) if alike else dense + states.expert_parameters / self._x.vpp
        )
        return np.where(self._u.units, self._u.computed(elements), 0.0)

    def _whole(self, turn: Column) -> Column:
        """Full gradients of a virtual stage by its turn in backward: the first has the head, the last the embedding."""
        states, u, vpp = self._states, self._u, self._x.vpp
        layers = (states.dense_parameters - u.head - u.embedding + states.expert_parameters) / vpp
        ends = np.where(turn == 1, u.head, 0.0) + np.where(turn == vpp, u.embedding, 0.0)
        whole = (layers + ends) * float(states.gradient_bytes)
        return np.where(u.units, np.maximum(whole - self._waits, 0.0), 0.0)

    def _others_behind(self, over: Column) -> Column:
        """What other virtual stages keep at weight gradients before which so many were made."""
        kept = self._kept
        return self._behind(*left_behind(kept.chunks, kept.waiting, np.maximum(kept.total - over - 1, 0)))

    def _behind(self, chunks: Column, waiting: Column) -> Column:
        """What others keep; no loss is among them, whose backward follows at once."""
        there = self._kept.on_device(chunks, waiting, window=0.0)
        return there - self._kept.head * np.minimum(chunks, 1)

    def _first_copies(self, wide: Column, turn: Column) -> tuple[Column, Column]:
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
        found = [(np.where(turn == 1, full(2 * units.head) - self._waits - wide, NEVER), none)]
        has_embedding = (turn == self._x.vpp) & (units.embedding > 0)
        with_it, without = np.where(has_embedding, 0.0, NEVER), np.where(has_embedding, NEVER, 0.0)
        for sequence, start in (((embedding, layer, experts), with_it), ((layer, experts), without)):
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
