"""Plans that were run dry: those that hold are recommended, those that do not stand behind them and say why."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from cost_models.errors import TitanPlanError
from planner import verify as verifying
from planner.answer import Answer, answer
from planner.answer_json import answer_object
from planner.cli.errors import run
from planner.question import ask
from planner.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runtime.dry_run.reduced import ReducedRun


@cache
def answered() -> Answer:
    return answer(ask(model="tiny", npus=2, global_batch=4))


def with_runs(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, ReducedRun], ReducedRun]) -> None:
    """Dry runs are real; what they find is changed."""
    real = verifying._run

    def changed(setting: Any, plan: Any, rank: int) -> ReducedRun:  # noqa: ANN401 - as verify calls it
        return change(plan.id, real(setting, plan, rank))

    monkeypatch.setattr(verifying, "_run", changed)


def test_plans_that_hold_keep_their_order() -> None:
    before, told = answered(), verify(answered(), 2)
    assert [one.plan for one in told.verified] == [plan.id for plan in before.listed[:2]]
    assert all(not one.problem and abs(one.difference) < 0.06 for one in told.verified)
    assert told.listed == before.listed
    assert (told.roomiest, told.simplest) == (before.roomiest, before.simplest)
    first = answer_object(told, {})["verified"][0]
    assert {"plan", "rank", "predicted_bytes", "found_bytes", "difference", "problem"} <= set(first)


@pytest.mark.parametrize(("factor", "words"), [(2, "less memory"), (0.5, "more memory"), (1e6, "does not fit")])
def test_one_that_contradicts_its_prediction_is_not_recommended(
    monkeypatch: pytest.MonkeyPatch, factor: float, words: str
) -> None:
    best = answered().plans[0].id

    def change(plan: str, found: ReducedRun) -> ReducedRun:
        return replace(found, peak_bytes=round(found.peak_bytes * factor)) if plan == best else found

    with_runs(monkeypatch, change)
    told = verify(answered(), 1)
    assert words in told.verified[0].problem
    assert [bool(one.problem) for one in told.verified] == [True, False]
    assert told.plans[0].id == answered().plans[1].id
    assert told.listed[-1].id == best
    assert best not in {plan.id for plan in (told.roomiest, told.simplest) if plan}


def test_one_that_the_trainer_refuses_is_not_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_plan: str, _found: ReducedRun) -> ReducedRun:
        raise TitanPlanError("S408", "a stage without layers", "fewer stages")

    with_runs(monkeypatch, refuse)
    told = verify(answered(), 1)
    assert all("S408" in one.problem for one in told.verified)
    assert len(told.verified) == min(len(answered().listed), 9)


def test_the_command_tells_and_fails_where_none_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--model", "tiny", "--npus", "2", "--global-batch", "4", "--verify", "1", "--out", str(tmp_path / "run")]
    assert run(options) == 0
    assert "dry run: " in capsys.readouterr().out
    with_runs(monkeypatch, lambda _plan, found: replace(found, peak_bytes=2 * found.peak_bytes))
    assert run(options) == 1
    assert "none of the plans that were run dry can be recommended" in capsys.readouterr().out
    assert run([*options, "--verify", "0"]) == 2
