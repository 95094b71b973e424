"""What is told of a search: order, margins, the guide's layout, days, and the JSON object."""

from __future__ import annotations

import itertools
import json
from functools import cache

import pytest

from cost_models.errors import TitanPlanError
from cost_models.layout import Layout
from planner.answer import Answer, answer
from planner.answer_json import answer_object
from planner.bounds import parse_bounds
from planner.candidates import TIE
from planner.question import ask


@cache
def answered(npus: int = 8, fix: str = "", tokens: str = "", model: str = "tiny", top: int = 5) -> Answer:
    bounds = parse_bounds((fix,) if fix else (), ())
    return answer(ask(model=model, npus=npus, global_batch=16, bounds=bounds, tokens=tokens or None, top=top))


@cache
def nothing_fits() -> Answer:
    return answer(ask(model="70B", npus=4, global_batch=16))


def test_listed_plans_are_sorted_and_no_two_of_them_tie() -> None:
    steps = [plan.step_time_s for plan in answered().listed]
    assert len(steps) > 2
    assert all(later > earlier for earlier, later in itertools.pairwise(steps))
    assert all(later > earlier * (1 + TIE / 2) for earlier, later in itertools.pairwise(steps))


@pytest.mark.parametrize("top", [1, 3, 1000])
def test_the_plans_told_are_the_first_of_those_listed(top: int) -> None:
    told = answered(top=top)
    assert told.plans == told.listed[:top]


def test_roomiest_and_simplest_are_within_five_percent_of_the_best() -> None:
    told = answered(16, model="llama2-7b")
    best = told.plans[0]
    assert told.roomiest is not None
    assert told.simplest is not None
    close = [plan for plan in told.listed if plan.step_time_s <= 1.05 * best.step_time_s]
    assert told.roomiest in close
    assert told.simplest in close
    assert told.roomiest.headroom_bytes == max(plan.headroom_bytes for plan in close)

    def dimensions(layout: Layout) -> int:
        return sum(getattr(layout, name) > 1 for name in ("tp", "cp", "pp", "vpp"))

    assert dimensions(told.simplest.layout) <= min(dimensions(plan.layout) for plan in close) + 1


def test_days_are_tokens_over_the_tokens_of_a_step_times_its_time() -> None:
    told = answered(tokens="3B")
    seconds = 3e9 / (16 * 128) * told.plans[0].step_time_s
    assert told.days == pytest.approx(seconds / 86400, rel=1e-12)
    assert told.device_hours == pytest.approx(8 * seconds / 3600, rel=1e-12)


def test_without_tokens_there_are_no_days() -> None:
    assert (answered().days, answered().device_hours) == (0, 0)


def test_the_guides_layout_is_told_where_it_is_valid() -> None:
    """TP4 x PP4, the rest data parallel, ZeRO-2, full recomputation, micro batch 1 (docs: users' guide)."""
    guide = answer(ask(model="tiny", npus=32, global_batch=64)).guide
    assert guide.plan is not None
    layout = guide.plan.layout
    assert (layout.tp, layout.pp, layout.dp, layout.zero, layout.recompute) == (4, 4, 2, 2, "full")
    assert (layout.micro_batch, layout.accumulation) == (1, 32)


def test_the_guides_layout_is_told_off_where_it_is_not() -> None:
    assert "8 devices are not a multiple of tp 4 x pp 4" in answered().guide.reason
    odd = answer(ask(model="tiny", npus=16, global_batch=2, bounds=parse_bounds(("tp=2,pp=2",), ()))).guide
    assert odd.plan is None
    assert odd.reason.startswith("S401")


def test_bounds_that_leave_nothing_are_an_error_and_not_an_empty_answer() -> None:
    with pytest.raises(TitanPlanError) as error:
        answered(fix="zero=9")
    assert error.value.code == "C650"


def test_where_nothing_fits_there_are_three_nearest_and_no_plan() -> None:
    told = nothing_fits()
    assert (told.plans, told.listed, told.front, told.roomiest, told.simplest) == ((), (), (), None, None)
    lacking = [told.question.margin_bytes - near.headroom_bytes for near in told.nearest]
    assert lacking == [pytest.approx(near.lacking_bytes, abs=16) for near in told.result.nearest]
    assert len(lacking) == 3
    assert lacking == sorted(lacking)
    assert lacking[0] > 0
    json.dumps(answer_object(told, {}), allow_nan=False)


def test_the_front_goes_from_fast_to_roomy() -> None:
    front = answered(16, model="llama2-7b").front
    assert len(front) > 1
    for earlier, later in itertools.pairwise(front):
        assert earlier.step_time_s < later.step_time_s
        assert earlier.headroom_bytes < later.headroom_bytes
    assert front[0].step_time_s == pytest.approx(answered(16, model="llama2-7b").plans[0].step_time_s, rel=TIE)


def test_margins_are_ratios_of_step_times() -> None:
    told = answered()
    margin = answer_object(told, {})["margin"]
    assert margin["runner_up"] == told.listed[1].id
    assert margin["over_runner_up"] == told.listed[1].step_time_s / told.listed[0].step_time_s
    assert margin["guide"] is None


def test_the_one_plan_that_fits_has_no_runner_up() -> None:
    fix = "tp=2,cp=1,pp=1,dp=4,sp=on,micro_batch=1,zero=0,recompute=none,swap=off,offload=off"
    margin = answer_object(answered(fix=fix), {})["margin"]
    assert margin["runner_up"] is None
    assert margin["over_runner_up"] is None


def test_bounds_are_told_in_words() -> None:
    inputs = answer_object(answered(fix="tp=2,recompute=full,schedule=1f1b"), {})["inputs"]
    assert inputs["fix"] == {"tp": 2, "recompute": "full", "schedule": "1f1b"}


def test_the_fixed_layers_win_where_keeping_all_would_fit() -> None:
    """`layers=1` was once only tried where a layout did not fit without any recomputation."""
    plans = answered(fix="recompute=layers=1").plans
    assert plans
    assert {plan.layout.recompute_text for plan in plans} == {"layers=1"}
    free, full = answered().plans[0], answered(fix="recompute=full").plans[0]
    assert {plan.layout.recompute_text for plan in answered(fix="recompute=full").plans} == {"full"}
    assert free.step_time_s < plans[0].step_time_s < full.step_time_s
