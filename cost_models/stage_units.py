"""Units that data parallelism gathers and reduces one by one, and the moments and passes that are told of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cost_models.layout import Column
from cost_models.schedules import ZB_V
from cost_models.stage_activations import InFlight
from cost_models.stage_states import EVERY, FP32_BYTES

if TYPE_CHECKING:
    from cost_models.layout import Layouts
    from cost_models.parameters import Stage
    from cost_models.setting import Setting
    from cost_models.stage_activations import StageActivations
    from cost_models.stage_parts import ModelParts
    from cost_models.stage_states import StageStates

NEVER = -np.inf
"""Added to the bytes of a moment that a layout does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Bytes alive beside what lives through the whole step; a layout without this moment has less than nothing.

    Attributes:
        weights: gathered for the step. gradients: accumulated or reduced ones. activations: on the device.
        transient: all else.
        unsent: of what a pipeline rank has under way later in the step, what it has not sent yet.
    """

    name: str
    weights: Column
    gradients: Column
    activations: Column
    transient: Column
    unsent: Column | float = 0.0

    @property
    def n_bytes(self) -> Column:
        """All of them."""
        return self.activations + self.transient + (self.weights + self.gradients) - self.unsent


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The backward of a micro batch through a virtual stage.

    Attributes:
        at: virtual stages in flight as it begins, and gradients that are there.
        waiting: other virtual stages, that wait for their weight gradients.
        reduces: gradients are reduced as units end.
        frees: gathered weights are freed as units end.
        there: 0 where the step has such a pass, minus infinity elsewhere.
        of_head: whether it can be one of the virtual stage with the head.
        weights: gathered for the step.
    """

    at: InFlight
    waiting: Column
    weights: Column
    reduces: Column
    frees: Column
    there: Column
    of_head: bool = True

    @property
    def chunks(self) -> Column:
        """Virtual stages in flight."""
        return self.at.chunks

    @property
    def earlier(self) -> Column:
        """Whether a backward of this rank came before."""
        return self.at.earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """What the moments of one pipeline rank are formed of."""

    setting: Setting
    layouts: Layouts
    parts: ModelParts
    stage: Stage
    states: StageStates
    kept: StageActivations


class StageUnits:
    """Weights and gradients of one rank, by what of them is whole, gathered or reduced.

    Attributes:
        layer, experts, embedding, head: elements of the last layer without its experts, of these, and of the ends.
        units: whether weights are gathered and gradients reduced unit by unit.
        third: whether weights are gathered for each use.
        every: whether gradients are reduced after each micro batch.
    """

    def __init__(self, rank: RankParts) -> None:
        self.rank, self.states, self.kept = rank, rank.states, rank.kept
        self._s, self._x, self._parts = rank.setting, rank.layouts, rank.parts
        self.layer, self.experts = rank.states.top_layer
        self.embedding, self.head = rank.states.ends
        self.units = (rank.layouts.zero > 0) & rank.setting.stack.fsdp
        self.third = rank.layouts.zero == 3
        self.every = rank.layouts.reduce_gradients == EVERY
        self._of_passes: dict[InFlight, Column] = {}

    def computed(self, elements: Column | float) -> Column:
        """In the precision that the model computes with."""
        return np.asarray(elements * self.states.weight_bytes)

    def copied(self, elements: Column) -> Column:
        """The full-precision copy of a unit that is reduced."""
        return np.where(self.units, elements * float(FP32_BYTES), 0.0)

    def shards(self, dense: Column, experts: Column) -> Column:
        """Reduced gradients of units."""
        elements = dense / self._parts.shard + experts / self._parts.expert_shard
        return np.where(self.units, elements * float(FP32_BYTES), 0.0)

    @cached_property
    def gathered(self) -> Column:
        """ZeRO-1 and 2: the rank's weights. ZeRO-3: a table that embedding and head share, from one to the other."""
        elements = np.where(self.third, self.kept.shares_table * self.embedding, self.states.whole_parameters)
        return np.where(self.units, self.computed(elements), 0.0)

    def gathered_at(self, at: InFlight) -> Column:
        """The same in a backward. What is reduced is freed: for good, or until weight gradients that come later."""
        some = self.every & self.kept.split & (at.gradients >= 1) & (self._x.vpp > 1)
        here = np.where(some, self._gathered_between, self.gathered) if np.any(some) else self.gathered
        layers = self.states.whole_parameters - self.embedding - self.head
        if np.any(at.reduced):
            freed = self.computed(at.reduced * layers + np.where(at.reduced > 0, self.head, 0.0))
            here = np.where(self.third, here, np.maximum(here - freed, 0.0))
        each_time = self.every & self.kept.split & self.kept.single & (at.gradients < 1)
        if np.any(each_time):
            # Those of earlier turns that had weight gradients are behind their last forward.
            turns = np.floor(np.maximum(at.over, 0) / self.kept.per_turn)
            had = np.ceil(np.maximum(at.over - self.kept.waiting, 0) / self.kept.per_turn)
            through = np.minimum(turns, had)
            freed = self.computed(through * layers / self._x.vpp + np.where(through > 0, self.head, 0.0))
            here = np.where(each_time & ~self.third, np.maximum(here - freed, 0.0), here)
        return here

    def gathers_alone(self, at: InFlight) -> Column:
        """Whether units are gathered one at a time in a backward: FSDP knows the next one from the forward before it.

        A reduction forgets the order. Of two backwards without a forward between the second gathers no next unit.
        """
        x = self._x
        if at is self.kept.latest:
            follows = x.schedule == ZB_V  # behind the last forward
        else:
            follows = (at.over > 0) & (at.chunks < self.kept.chunks) & (x.vpp == 1) & ~self.kept.split
        return np.asarray(self.units & self.third & self.every & (x.pp > 1) & follows)

    @cached_property
    def _gathered_between(self) -> Column:
        embedding, head = self.embedding, self.head
        layers = (self.states.whole_parameters - embedding - head) / self._x.vpp
        # The one virtual stage of a fold that has weights is that with the embedding or that with the head.
        ends = np.where(self._x.schedule == ZB_V, np.maximum(embedding, head), embedding + head)
        return np.minimum(self.gathered, self.computed(layers * self.kept.gathered_chunks + ends))

    @cached_property
    def gathered_of_last(self) -> Column:
        """The same of the virtual stage whose backward comes last."""
        states, vpp = self.states, self._x.vpp
        layers = states.whole_parameters - self.head - self.embedding
        mine = self.computed(layers / vpp + self.embedding)
        return np.where(self.units & ~self.third, mine, 0.0)

    @cached_property
    def _accumulated_bytes(self) -> tuple[Column, Column]:
        """Of an element between micro batches, dense and of experts, beside what lasts through the step."""
        states, parts = self.states, self._parts
        if not self._s.stack.fsdp:
            nothing = np.zeros_like(parts.shard, dtype=float)
            return nothing, nothing
        sharded = self.every
        alone = np.where((self._x.zero == 0) & (states.lasting_gradients == 0), float(states.gradient_bytes), 0.0)
        dense, experts = (
            np.where(self.units, np.where(sharded, float(FP32_BYTES) / n, float(states.gradient_bytes)), alone)
            for n in (parts.shard, parts.expert_shard)
        )
        return dense, experts

    def gradients(self, at: InFlight) -> Column:
        """Accumulated and reduced ones, and a head's that waits while it is the turn of its virtual stage."""
        between = (self._x.vpp > 1) & (at.gradients > 0) & (at.gradients < 1)
        found = self.settled(at)
        return found + np.where(between, 0.0, self.pending_head) if np.any(self.pending_head) else found

    def settled(self, at: InFlight) -> Column:
        """Accumulated and reduced ones."""
        if at not in self._of_passes:
            self._of_passes[at] = self._gradients(at)
        return self._of_passes[at]

    def _gradients(self, at: InFlight) -> Column:
        """The head is in the virtual stage that comes first in backward, the embedding in the last."""
        dense_bytes, expert_bytes = self._accumulated_bytes
        states = self.states
        dense, experts = states.dense_parameters - self.head - self.embedding, states.expert_parameters
        layers = at.gradients * (dense * dense_bytes + experts * expert_bytes)
        over = at.reduced > 0
        head = np.where(over, 0.0, self.head * at.earlier * (at.gradients > 0) * dense_bytes)
        reduced = at.reduced * self.shards(dense, experts) + over * self.shards(self.head, 0.0 * dense)
        return (
            layers
            + head
            + self.embedding * (at.gradients + at.reduced >= 1) * (at.gradients > 0) * dense_bytes
            + reduced
        )

    @cached_property
    def pending_head(self) -> Column:
        """The head's whole gradient, made with those of inputs, where it waits for the others of its micro batch."""
        waits = self.units & self.every & (self.kept.waiting > 0)
        return np.where(waits, self.head * float(self.states.gradient_bytes), 0.0)

    @cached_property
    def reduced(self) -> Column:
        """All gradients behind the last backward."""
        states = self.states
        return np.where(
            self.units,
            self.shards(states.dense_parameters, states.expert_parameters),
            self.gradients(all_gradients(self.kept.share)),
        )


def all_gradients(share: Column) -> InFlight:
    """Nothing in flight, and this share of all gradients."""
    return InFlight(0.0 * share, share, np.where(share > 0, np.inf, 0.0), 0.0 * share)
