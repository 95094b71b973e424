"""The best plans are run dry before they are recommended: what contradicts its prediction goes behind the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cost_models.errors import TitanPlanError
from planner.dry_compare import contradiction, predict_rank, room_of
from planner.dry_setting import worst_rank
from planner.quiet_torch import quiet_torch
from planner.verified import Verified

if TYPE_CHECKING:
    from collections.abc import Callable

    from cost_models.plan import Plan
    from cost_models.setting import Setting
    from planner.answer import Answer
    from runtime.dry_run.reduced import ReducedRun

# Where none of those asked for holds, as many more are tried.
_MORE = 8


def verify(answer: Answer, count: int, said: Callable[[int, str], None] = lambda _n, _plan: None) -> Answer:
    """Run the best plans dry, and put those that hold first.

    Args:
        count: plans to run; if none of them holds, a few more.
        said: told of each plan before it is run.
    """
    found: list[Verified] = []
    for plan in answer.listed[: count + _MORE]:
        if len(found) >= count and any(not one.problem for one in found):
            break
        said(len(found) + 1, plan.id)
        found.append(_verified(answer.question.setting, plan, answer.question.margin_bytes))
    bad = {one.plan for one in found if one.problem}
    listed = tuple(sorted(answer.listed, key=lambda plan: plan.id in bad))
    return replace(
        answer,
        plans=listed[: answer.question.top],
        listed=listed,
        roomiest=_other(answer.roomiest, bad),
        simplest=_other(answer.simplest, bad),
        verified=tuple(found),
    )


def _other(plan: Plan | None, bad: set[str]) -> Plan | None:
    return None if plan is None or plan.id in bad else plan


def _verified(setting: Setting, plan: Plan, margin_bytes: float) -> Verified:
    rank = worst_rank(setting, plan.layout)
    predicted = predict_rank(setting, plan.layout, rank).peak_bytes
    try:
        run = _run(setting, plan, rank)
    except TitanPlanError as error:
        return Verified(
            plan=plan.id,
            rank=rank,
            predicted_bytes=predicted,
            found_bytes=0,
            device_peak_bytes=0,
            problem=f"{error.code}: the trainer does not run it: {error.message}",
            seconds=0.0,
        )
    room = room_of(setting, plan.layout, rank)
    one = Verified(
        plan=plan.id,
        rank=rank,
        predicted_bytes=predicted,
        found_bytes=run.peak_bytes,
        device_peak_bytes=room.peak_bytes(run.peak_bytes),
        problem="",
        seconds=run.seconds,
    )
    return replace(one, problem=_problem(one, room.usable_bytes - margin_bytes))


def _problem(one: Verified, usable_bytes: float) -> str:
    gib = float(2**30)
    if one.device_peak_bytes > usable_bytes:
        return f"does not fit: {one.device_peak_bytes / gib:.2f} GiB of {usable_bytes / gib:.2f} GiB"
    return contradiction(one.difference)


def _run(setting: Setting, plan: Plan, rank: int) -> ReducedRun:
    with quiet_torch():
        from runtime.config_values import TrainConfig
        from runtime.dry_run.reduced import reduced_dry_run

        config = TrainConfig(
            model=setting.model, workload=setting.workload, layout=plan.layout, cluster=setting.cluster.name
        )
        return reduced_dry_run(config, rank)
