"""Every layout that the planner would consider for a small model, and which of them its rules let through."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster
from cost_models.layout import Layout, Layouts
from cost_models.rules import first_violations
from cost_models.setting import Setting
from cost_models.stack import TITAN
from planner.bounds import Bounds
from planner.space import Space
from tests.runtime.parity.models import MODELS
from tests.runtime.parity.training import config_of

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallSpace:
    """The layouts of one model on so many devices, as the planner's blocks."""

    model: str
    n_devices: int
    setting: Setting
    blocks: tuple[Layouts, ...] = field(repr=False)

    @classmethod
    def of(cls, model: str, n_devices: int) -> SmallSpace:
        """The whole space: no bounds."""
        config = config_of(MODELS[model], {})
        setting = Setting(
            model=config.model,
            workload=config.workload,
            cluster=find_cluster("local"),
            stack=TITAN,
            calibration=calibration_of("local-cpu"),
            n_devices=n_devices,
        )
        space = Space(setting=setting, bounds=Bounds())
        blocks = tuple(rows.block() for rows in space.rows(space.meshes()))
        return cls(model=model, n_devices=n_devices, setting=setting, blocks=blocks)

    def indices(self) -> list[tuple[int, int]]:
        """(block, position) of each valid layout."""
        found = []
        for number, block in enumerate(self.blocks):
            valid = np.broadcast_to(first_violations(self.setting, block), block.shape).reshape(-1) < 0
            found += [(number, int(at)) for at in np.flatnonzero(valid)]
        return found

    def layout(self, index: tuple[int, int]) -> Layout:
        """One layout."""
        return self.blocks[index[0]].one(index[1])

    def sample(self, count: int, seed: int, kind: Callable[[Layout], object]) -> list[Layout]:
        """Valid layouts by chance, as evenly over their kinds as there are some of each."""
        chance = random.Random(seed)  # noqa: S311 - a sample, no secret
        indices = self.indices()
        chance.shuffle(indices)
        by_kind: dict[object, list[Layout]] = {}
        for index in indices[: 40 * count]:
            layout = self.layout(index)
            by_kind.setdefault(kind(layout), []).append(layout)
        taken: list[Layout] = []
        while len(taken) < count and any(by_kind.values()):
            for layouts in by_kind.values():
                if layouts and len(taken) < count:
                    taken.append(layouts.pop())
        return taken


def kind_of(layout: Layout) -> tuple[object, ...]:
    """What the trainer does by other code: its dimensions, schedule, sharding and what it saves."""
    x = layout
    return (x.schedule, x.cp_kind, x.zero, x.ep > 1, x.tp > 1, x.sp, x.recompute, x.reduce_gradients)
