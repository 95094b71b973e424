"""Live bytes of one pipeline rank: what lives through the whole step, and the fullest of its moments."""

from __future__ import annotations

from functools import cached_property, reduce
from typing import TYPE_CHECKING

import numpy as np

from cost_models.schedules import ONE_F_ONE_B
from cost_models.stage_activations import StageActivations
from cost_models.stage_bounds import StageBounds
from cost_models.stage_moments import StageMoments
from cost_models.stage_states import StageStates
from cost_models.stage_units import RankParts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cost_models.layout import Column, Layouts
    from cost_models.parameters import Stage
    from cost_models.setting import Setting
    from cost_models.stage_parts import ModelParts
    from cost_models.stage_units import Moment


class StageMemory:
    """One rank's bytes. Each quantity is a column in the shape of what it depends on, made once."""

    def __init__(self, setting: Setting, layouts: Layouts, parts: ModelParts, stage: Stage) -> None:
        self._s, self._x, self.stage = setting, layouts, stage
        self.states = StageStates(setting, layouts, parts.params, parts.shard, parts.expert_shard, stage)
        self.kept = StageActivations(setting, layouts, parts, stage)
        rank = RankParts(setting=setting, layouts=layouts, parts=parts, stage=stage, states=self.states, kept=self.kept)
        self._moments = StageMoments(rank)
        self.bounds = StageBounds(self._moments)

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Candidates for the peak."""
        return (*self._moments.before_update, self._moments.update)

    @cached_property
    def static(self) -> Column:
        """What lives through the whole step; less than nothing where the layout has no such rank."""
        states = self.states
        lasting = states.lasting_weights + states.main_weights + states.optimizer + self.pipeline_buffers
        return np.where(self.stage.exists, lasting, -np.inf) + states.lasting_gradients + self.kept.inputs

    @cached_property
    def update_bytes(self) -> Column:
        """Beside what lasts, during the optimizer's step, when nothing is under way between stages any more."""
        return self._moments.update.n_bytes - self.pipeline_buffers

    @cached_property
    def highest(self) -> Column:
        """The fullest moment before the optimizer's step; swapping its state makes no difference to it."""
        return reduce(np.maximum, (moment.n_bytes for moment in self._moments.before_update))

    @cached_property
    def tensors(self) -> Column:
        """Live bytes at the peak."""
        return self.static + np.maximum(self.highest, self.update_bytes)

    def categories(self) -> dict[str, Column]:
        """The same bytes by category."""
        states = self.states
        totals = np.broadcast_arrays(*(moment.n_bytes for moment in self._moments.before_update), self.update_bytes)
        which = first_with(reduce(np.maximum, totals), totals)
        updates = which == len(totals) - 1

        def at(name: str) -> Column:
            found = np.zeros(which.shape)
            for place, moment in enumerate(self.moments):
                found = np.where(which == place, getattr(moment, name), found)
            return found

        return {
            "weights": states.lasting_weights + at("weights"),
            "gradients": states.lasting_gradients + at("gradients"),
            "main_weights": states.main_weights,
            "optimizer": states.optimizer,
            "activations": at("activations"),
            "transient": at("transient") + self.kept.inputs,
            "pipeline_buffers": np.where(updates, 0.0, self.pipeline_buffers - at("unsent")),
        }

    @cached_property
    def swapped(self) -> Column:
        """Main weights and moments in host memory."""
        return self.states.swapped

    @cached_property
    def offloaded(self) -> Column:
        """Activations in host memory: of all layers in flight, those on the device too."""
        offloads = self.stage.exists & (self._x.activation_offload == 1)
        kept = self.kept
        return np.where(offloads, kept.chunks * kept.per_virtual_stage * kept.kept_per_layer, 0.0)

    @cached_property
    def pipeline_buffers(self) -> Column:
        """Sends under way once all virtual stages have sent."""
        return np.where(self._x.schedule == ONE_F_ONE_B, 1, self._x.vpp) * self.kept.sends_of_stage


def first_with(value: Column, options: Sequence[Column]) -> Column:
    """Index of the first option that equals `value`, element by element; one of them does."""
    index = np.asarray(len(options) - 1)
    for i in reversed(range(len(options) - 1)):
        index = np.where(options[i] == value, i, index)
    return index
