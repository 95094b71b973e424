"""Moments of a step that can be a pipeline rank's peak: what is alive together, beside what lives through all of it.

Which moment is the fullest is a matter of the layout. The loss holds all activations, the head's weight gradient and
logits; the last layer's backward the widest tensors; the end of a unit's backward its gradient and the copy that is
reduced; a later micro batch all accumulated gradients; an early layer's backward all reduced ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cost_models.stage_activations import InFlight
from cost_models.stage_ends import StageEnds
from cost_models.stage_late_gradients import StageLateGradients
from cost_models.stage_layers import StageLayers
from cost_models.stage_reductions import StageReductions
from cost_models.stage_units import NEVER, Moment, Pass, RankParts, StageUnits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cost_models.layout import Column


class StageMoments:
    """The moments of one rank."""

    def __init__(self, rank: RankParts) -> None:
        self._s, self._x, self._stage = rank.setting, rank.layouts, rank.stage
        self.rank, self.states, self.kept = rank, rank.states, rank.kept
        self.units = StageUnits(rank)
        self._layers = StageLayers(self.units)
        self.ends = StageEnds(self.units, self._layers)
        self._reductions = StageReductions(self.units, self._layers, self.ends)

    @cached_property
    def before_update(self) -> tuple[Moment, ...]:
        """All candidates but the optimizer's step."""
        found: list[Moment] = []
        has_head, third = np.any(self._stage.has_head), np.any(self.units.third)
        for each in self._passes():
            of_pass = self._last_layer(each)
            of_pass += [self.ends.loss(each), self.ends.head_norm(each)] if has_head and each.of_head else []
            if self._s.stack.fsdp and np.any(self.units.units):
                of_pass += self._reductions.of_pass(each) if np.any(each.reduces) else []
                of_pass += self.ends.gathering(each) if third else []
            of_pass.append(self.ends.forward(each))
            of_pass += [self.ends.forward_again(each)] if np.any(self.kept.in_part) else []
            unsent = self.kept.unsent(each.at.over)
            found += [replace(moment, unsent=unsent) for moment in of_pass] if np.any(unsent) else of_pass
        alone = self._s.stack.fsdp & self.units.units & (self._x.pp == 1)
        if np.any(alone):
            first = InFlight(self.kept.chunks, 0.0 * self.kept.share, np.asarray(0), 0.0 * self.kept.share)
            no = np.asarray(False)
            at = Pass(
                at=first,
                waiting=self.kept.waiting,
                weights=self.units.gathered,
                reduces=no,
                frees=no,
                there=np.where(alone, 0.0, NEVER),
            )
            found += [self.ends.loss(at), *self.ends.gathering(at)]
        if self._s.stack.fsdp:
            found += self._reductions.between
        found += self.ends.warm_up
        if np.any(self.kept.split):
            found += StageLateGradients(self.units).moments
        return tuple(found)

    def _passes(self) -> Iterator[Pass]:
        """Backwards that can be the fullest: with most in flight, with more gradients, with the last ones reduced."""
        x, kept = self._x, self.kept
        once, split = x.accumulation == 1, kept.split
        reduces = (once | self.units.every) & ~split
        frees = self.units.units & ~self.units.third & ~split
        no, many = np.asarray(False), np.where(once, NEVER, 0.0)
        always = np.zeros_like(kept.chunks)

        def pass_(
            at: InFlight,
            reduces: Column,
            frees: Column,
            there: Column,
            waiting: Column = kept.waiting,
            weights: Column | None = None,
        ) -> Pass:
            gathered = self.units.gathered_at(at) if weights is None else weights
            return Pass(at=at, waiting=waiting, weights=gathered, reduces=reduces, frees=frees, there=there)

        yield pass_(kept.fullest, reduces, frees & once, always)
        several = bool(np.any(x.accumulation > 1))
        if several:
            yield pass_(kept.steady, reduces, no, np.where(kept.steady.chunks > 0, 0.0, NEVER))
            yield pass_(kept.last, ~split, frees, many)
        if np.any(x.vpp > 1):
            if several:
                yield pass_(kept.risen, reduces, no, np.where(kept.risen.chunks > 0, 0.0, NEVER))
            there = np.where((x.vpp > 1) & ~split, 0.0, NEVER)
            yield pass_(kept.final, ~split, frees, there, weights=self.units.gathered_of_last)
            if np.any(split):
                there = np.where((x.vpp > 1) & split, 0.0, NEVER)
                for at in kept.last_inputs:
                    yield replace(pass_(at, no, no, there), of_head=False)
        frees_weights = kept.split & self.units.every & (x.vpp > 1)
        if np.any(frees_weights):
            # All weights are there until the virtual stage whose turn is last has gradients too.
            first = np.where(frees_weights, many, NEVER)
            yield pass_(replace(kept.fullest, gradients=0.0 * kept.share), no, no, first)
            yield replace(pass_(kept.before_all(kept.fullest), no, no, first), of_head=False)
        if np.any(kept.late[1] > kept.waiting):
            there = np.where(kept.late[1] > kept.waiting, 0.0, NEVER)
            yield pass_(kept.latest, no, no, there, kept.late[1], self.units.gathered)

    def _last_layer(self, at: Pass) -> list[Moment]:
        """The last layer's backward, and with offload that of the one before it, which has two layers on the device."""
        kept, per_stage = self.kept, self.kept.longest
        new = np.where(at.reduces & ~(at.earlier), self.units.shards(self.units.head, 0.0 * self.units.head), 0.0)
        whole = np.where(at.reduces & ~self.units.every & (at.earlier), self.states.gradient_bytes, 0)
        if at.of_head and np.any(kept.split):
            # The head's gradient is made with those of inputs, and waits for the others if it did not yet.
            made = self.units.units & kept.split & (self.units.every | ~at.earlier)
            new = new + np.where(
                made, self.units.head * float(self.states.gradient_bytes) - self.units.pending_head, 0.0
            )
        peak = self._layers.last(at, fetched=False)

        def moment(name: str, gone: Column | float, top: Column | float, window: Column, transient: Column) -> Moment:
            return Moment(
                name=name,
                weights=at.weights - np.where(at.frees, self.units.computed(self.units.head), 0.0),
                gradients=self.units.gradients(at.at) + new - np.where(self.units.units, whole * self.units.head, 0.0),
                activations=kept.on_device(at.chunks, at.waiting, gone, window, top) - kept.head_behind,
                transient=transient + at.there,
            )

        offloads = self._x.activation_offload == 1
        fetched = self._layers.last(at, fetched=True) if np.any(offloads) else peak
        window = np.where(offloads, np.clip(per_stage - 1, 0, 1), 2.0)
        found = [moment("last layer", 0.0, 1.0, window, np.where(offloads, fetched, peak))]
        through = ~(at.reduces & self.units.units)  # else StageReductions has the layers below, with units between
        if np.any(offloads):
            inner = np.where(offloads & through, self._layers.below("", np.asarray(1.0), at), NEVER)
            found.append(moment("inner layer", 0.0, 1.0, np.clip(per_stage - 1, 0, 2), inner))
        if np.any(kept.in_part):
            again = np.where(kept.in_part & through, self._layers.behind("", at, again=True), NEVER)
            found.append(moment("recomputed layer", kept.whole_layers, kept.whole_layers, kept.window, again))
        first_pass = ~at.reduces & ~at.earlier & self.units.units & ~kept.split
        if np.any(first_pass):
            # Nothing is reduced yet: whole gradients grow while layers are freed.
            gone = np.maximum(per_stage - 2, 0)
            elements = self.units.head + gone * (self.units.layer + self.units.experts)
            grown = np.where(first_pass, elements * float(self.states.gradient_bytes), 0.0)
            transient = self._layers.below("", gone, at) + np.where(first_pass, 0.0, NEVER)
            low = moment("low layer", gone, gone, np.clip(per_stage, 0, 2), transient)
            found.append(replace(low, gradients=low.gradients + grown))
        if np.any(kept.split):
            # Under ZeRO-3 the second layer gathers the first.
            for name, above in (("first layer", per_stage - 1), ("second layer", per_stage - 2)):
                there = np.where(
                    kept.split & ((above == per_stage - 1) | ((above >= 1) & self.units.third)), 0.0, NEVER
                )
                below = self._layers.below("", above, at)
                # What waits for weight gradients has grown by all layers above.
                grown = above * kept.deferred - np.where(offloads, 0.0, kept.from_top(np.maximum(above, 0))) + there
                window = np.where(offloads, np.clip(per_stage - 1, 0, 1), 2)
                peak = np.where(offloads & (per_stage < 2), fetched, below)
                found.append(moment(name, 0.0, above, window, peak + grown))
                if not np.any(self.units.third):
                    break
        return found

    @cached_property
    def update(self) -> Moment:
        """The optimizer's step."""
        nothing = np.zeros_like(self._x.zero, dtype=float)
        return Moment(
            name="update",
            weights=nothing,
            gradients=self.units.reduced,
            activations=nothing,
            transient=self.states.swap_slices,
        )
