"""Layouts that the planner calls valid run in the trainer, and train like one process."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cost_models.layout import Layout
from runtime.guard import check_layout
from tests.ranks import RankError
from tests.runtime.parity.cases import case
from tests.runtime.parity.comparing import FULL, deviation
from tests.runtime.parity.models import MODELS
from tests.runtime.parity.space import SmallSpace, kind_of
from tests.runtime.parity.training import BATCH, config_of, train_layout

if TYPE_CHECKING:
    from tests.ranks import RankPool
    from tests.runtime.parity.training import Curve

STEPS = 2
SEED = 20
# One of each schedule and kind of cp, ZeRO 0 to 3, experts over ep; 2 steps each.
FEW = 12
MANY = 150


def curve_of_one(ranks: RankPool, model: str) -> Curve:
    return ranks.run(1, train_layout, MODELS[model], {"batch_size": BATCH}, Layout(accumulation=BATCH), STEPS)[0]


def failures(ranks: RankPool, model: str, layouts: list[Layout]) -> list[str]:
    """What went wrong, one line a layout."""
    wanted, told = curve_of_one(ranks, model), []
    for layout in layouts:
        try:
            curve = ranks.run(layout.devices, train_layout, MODELS[model], {"batch_size": BATCH}, layout, STEPS)[0]
        except RankError as failure:
            told.append(f"{layout.name}: {str(failure)[-1500:]}")
            continue
        found = deviation(curve, wanted)
        if not (found.loss <= FULL.loss and found.norm <= FULL.norm):
            told.append(f"{layout.name}: {found}")
    return told


@pytest.mark.parametrize(("model", "devices"), [("tiny", 1), ("tiny", 4), ("tiny-moe", 2), ("tiny-moe", 8)])
def test_the_guard_lets_through_what_the_planner_calls_valid(model: str, devices: int) -> None:
    config = config_of(MODELS[model], case().sections)
    for layout in SmallSpace.of(model, devices).sample(40, SEED, kind_of):
        check_layout(replace(config, layout=layout), kind="cpu")


def test_a_few_valid_layouts_of_each_schedule_run(ranks: RankPool) -> None:
    layouts = SmallSpace.of("tiny", 2).sample(FEW, SEED, lambda x: (x.schedule, x.cp_kind))
    assert {x.schedule for x in layouts} == {"none", "gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v"}
    assert failures(ranks, "tiny", layouts) == []


def test_a_few_valid_layouts_with_experts_run(ranks: RankPool) -> None:
    layouts = SmallSpace.of("tiny-moe", 4).sample(FEW // 2, SEED, lambda x: (x.ep, x.zero > 0))
    assert {x.ep for x in layouts} == {1, 2, 4}
    assert failures(ranks, "tiny-moe", layouts) == []


@pytest.mark.heavy
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_a_large_sample_of_valid_layouts_runs(ranks: RankPool, model: str, devices: int) -> None:
    """As evenly over what the trainer does by other code as the space allows; the whole space is tens of thousands."""
    layouts = SmallSpace.of(model, devices).sample(MANY if devices < 8 else MANY // 2, SEED, kind_of)
    assert failures(ranks, model, layouts) == []
