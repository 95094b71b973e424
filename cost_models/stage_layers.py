"""What one layer's backward and forward hold on a pipeline rank, beside what it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING

import numpy as np

from cost_models.stage_activations import SELECTIVE

if TYPE_CHECKING:
    from collections.abc import Callable

    from cost_models.layer_backward import LayerBackward
    from cost_models.layout import Column
    from cost_models.stage_units import Pass, StageUnits


@dataclass(frozen=True, slots=True)
class _Behind:
    """What a layer's backward comes behind.

    Attributes:
        copy: bytes of the copy that is being reduced as the layer begins.
        experts: bytes of the copy of the layer's own experts beside what it was made of, behind these.
        fetched: saved tensors come from the host one by one; nothing is taken off.
        again: a layer that is made again, of those that are recomputed in part.
        alone: no other unit is gathered meanwhile.
    """

    copy: Column
    experts: Column
    fetched: bool
    again: bool
    alone: bool


class StageLayers:
    """The last layer of a stage stands for all."""

    def __init__(self, units: StageUnits) -> None:
        rank, self._u = units.rank, units
        self._s, self._x, self._parts, self._stage = rank.setting, rank.layouts, rank.parts, rank.stage
        self._states, self._kept = rank.states, rank.kept
        self._peaks: dict[tuple[str, bool, bool, str], Column] = {}

    def last(self, at: Pass, *, fetched: bool) -> Column:
        """Of the last layer, behind the head."""
        plain = self.behind("", at, fetched=fetched)
        return np.where(at.reduces, self.behind("head", at, fetched=fetched), plain) if np.any(at.reduces) else plain

    def behind(
        self, before: str, at: Pass, *, fetched: bool = False, again: bool = False, lowest: Column | bool = False
    ) -> Column:
        """Of a layer behind a unit whose copy is being reduced, or none.

        Args:
            lowest: no unit is below it.
            again: of a virtual stage that is recomputed in part, a layer that is made again; otherwise one that is not.
        """
        again = again and bool(np.any(self._kept.in_part))
        found = self._kept_peak(before, fetched, again, "")
        variants = [("alone", self._u.gathers_alone(at.at) | (lowest & self._u.third & self._u.units))]
        if np.any(self._u.experts) and before:
            variants.append(("accumulated", at.earlier & ~self._u.every))
        for name, where in variants:
            if np.any(where):
                found = np.where(where, self._kept_peak(before, fetched, again, name), found)
        return found

    def _kept_peak(self, before: str, fetched: bool, again: bool, variant: str) -> Column:
        key = before, fetched, again, variant
        if key not in self._peaks:
            unit = {
                "": 0.0 * self._u.layer,
                "head": self._u.copied(self._u.head),
                "layer": self._u.copied(self._u.layer),
            }[before]
            experts = self._u.copied(self._u.experts) if before else 0.0 * self._u.experts
            if variant == "accumulated":
                accumulated = self._u.experts * float(self._states.gradient_bytes)
                shards = self._u.shards(0.0 * self._u.layer, self._u.experts)
                experts = experts - np.where(self._u.units, accumulated - shards, 0.0)
            behind = _Behind(unit, experts, fetched=fetched, again=again, alone=variant == "alone")
            self._peaks[key] = self._peak_of_layer(behind)
        return self._peaks[key]

    def below(self, before: str, gone: Column, at: Pass) -> Column:
        """The same of the layer below so many."""
        lowest = (gone >= self._kept.longest - 1) & (self._stage.has_embedding == 0)
        whole = self.behind(before, at, lowest=lowest)
        if not np.any(self._kept.in_part):
            return whole
        again = self._kept.in_part & (gone >= self._kept.whole_layers)
        return np.where(again, self.behind(before, at, again=True, lowest=lowest), whole)

    def _peak_of_layer(self, at: _Behind) -> Column:
        """The fullest instant of a layer's backward, less what its activations kept."""
        before, fetched, again = at.copy, at.fetched, at.again
        whole = self._kept.in_part & (not again)

        def of_kind(sparse: bool) -> Column:
            kept, parts = self._kept, self._parts
            plain, lean = parts.backward("none", sparse=sparse), parts.backward("selective", sparse=sparse)
            made = self._highest(plain, at)
            none = made if not fetched else self._highest(plain, at, fetched=True)
            some = np.any(self._x.recompute == SELECTIVE)
            selective = self._highest(lean, at, fetched=fetched) if some else none
            none = np.maximum(none, self._arriving(plain.saved, before))
            selective = np.maximum(selective, self._arriving(lean.saved, before))
            made = np.maximum(made, self._arriving(plain.saved - plain.routed, before))
            if fetched:
                return kept.by_recompute(none, selective, np.where(whole, none, made))
            none = none - plain.saved
            made = np.where(whole, none, made - kept.checkpoint)
            return kept.by_recompute(none, selective - lean.saved, made)

        return self._by_kind(of_kind)

    def _arriving(self, saved: Column, before: Column) -> Column:
        """ZeRO-3: experts whose shards are not along the first axis are put together in a copy more than others."""
        turned = self._u.third & self._u.units & self._states.experts_turned & (self._u.experts > 0)
        weights = self._u.computed(self._u.layer + 3 * self._u.experts)
        return np.where(turned, saved + self._kept.own + before + weights, 0.0)

    def _by_kind(self, of_kind: Callable[[bool], Column]) -> Column:
        """Of the kind of layer that is the stage's last: with routed experts or without."""
        if self._s.model.moe is None:
            return of_kind(False)
        if not self._s.model.dense_layers:
            return of_kind(True)
        return np.where(self._stage.moe_layers > 0, of_kind(True), of_kind(False))

    def _highest(self, layer: LayerBackward, at: _Behind, *, fetched: bool = False) -> Column:
        """Fullest instant with weight gradients and, under ZeRO-3, gathered weights: a unit's and the next one's."""
        before_it = np.where(self._kept.longest > 1, self._u.layer, 0.0) * (not at.alone)
        next_ = np.where(self._u.experts > 0, self._u.experts, before_it) * (not at.alone)
        gathered = {
            "layer": self._u.layer + next_,
            "experts": self._u.layer + self._u.experts + before_it,
            "behind": self._u.layer + before_it,
        }
        copies = {"layer": at.copy, "experts": at.copy, "behind": at.experts}
        found = []
        for instant in layer.instants:
            here = (instant.fetched if fetched else instant.alive) + copies[instant.unit]
            if not self._s.stack.fused_accumulation:
                made = np.where(self._u.units, instant.made, instant.making)
                here = here + np.where(self._kept.split, 0.0, self._u.computed(made))
            here = here + np.where(self._kept.split, instant.waiting, 0.0)
            found.append(here + np.where(self._u.third, self._u.computed(gathered[instant.unit]), 0.0))
        return reduce(np.maximum, found)

    @cached_property
    def running(self) -> Column:
        """What the last layer's forward holds at its end beside what it keeps."""
        kept, parts = self._kept, self._parts

        def of_kind(sparse: bool) -> Column:
            plain, lean = parts.backward("none", sparse=sparse), parts.backward("selective", sparse=sparse)
            selective = plain.saved - lean.saved + plain.product
            full = np.where(self._x.recompute_layers > 0, plain.product, plain.running)
            return kept.by_recompute(plain.product, selective, full)

        return self._by_kind(of_kind)

    @cached_property
    def running_again(self) -> Column:
        """What the forward of a layer that is recomputed holds beside its input."""

        def of_kind(sparse: bool) -> Column:
            return self._parts.backward("none", sparse=sparse).running

        return self._by_kind(of_kind)

    def behind_experts(self, *, again: bool) -> Column:
        """Alive as the experts' backward ends, less what the layer kept.

        Args:
            again: as for `behind`.
        """
        kept, parts = self._kept, self._parts
        plain, lean = parts.backward("none", sparse=True), parts.backward("selective", sparse=True)
        none = plain.behind_experts
        whole = kept.in_part & (not again)
        full = none - np.where(whole, plain.saved, kept.checkpoint)
        return kept.by_recompute(none - plain.saved, lean.behind_experts - lean.saved, full)
