"""Answer: what a search found, in the form that people and programs are told it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from cost_models.errors import TitanPlanError
from cost_models.layout import Layout
from cost_models.plan import Plan, plans_of
from cost_models.rules import violation
from planner.candidates import TIE, Candidates, complexity
from planner.search import SearchResult, search

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.question import Question
    from planner.verified import Verified

_SECONDS_PER_DAY = 86_400.0
# The users' guide's own layout: TP4 x PP4, the rest data-parallel, ZeRO-2, full recomputation, micro batch 1.
GUIDE_TP, GUIDE_PP = 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideLayout:
    """The users' guide's layout on the same devices; without a plan where it is not a valid one."""

    plan: Plan | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A search's outcome.

    Attributes:
        plans: the best, fastest first; of layouts with equal step time only the simplest.
        listed: further fitting layouts for plans.csv, the best ones first.
        roomiest, simplest: within 5 % of the best step time, the one with most room, with least machinery.
        nearest: where nothing fits, the layouts that lack the least memory.
        days, device_hours: to train on the tokens asked for; 0 where not asked.
        verified: plans that were run dry, in the order of their prediction; those that did not hold stand last in
            `listed`.
    """

    question: Question
    result: SearchResult
    plans: tuple[Plan, ...]
    listed: tuple[Plan, ...]
    front: tuple[Plan, ...]
    roomiest: Plan | None
    simplest: Plan | None
    guide: GuideLayout
    nearest: tuple[Plan, ...]
    days: float
    device_hours: float
    verified: tuple[Verified, ...] = ()


def answer(question: Question, progress: Callable[[int, int], None] = lambda _done, _all: None) -> Answer:
    """Search, and predict what is shown in full."""
    result = search(question.setting, question.bounds, margin_bytes=question.margin_bytes, progress=progress)
    if not result.layouts:
        raise TitanPlanError("C650", "--fix and --max leave no layout at all", "loosen them, one at a time")
    listed = _distinct(result.best) if result.best else []
    plans = plans_of(question.setting, listed)
    close = [plan for plan in plans if plan.step_time_s <= 1.05 * plans[0].step_time_s]
    best_s = plans[0].step_time_s if plans else 0.0
    days = question.tokens / question.setting.workload.tokens * best_s / _SECONDS_PER_DAY
    return Answer(
        question=question,
        result=result,
        plans=plans[: question.top],
        listed=plans,
        front=plans_of(question.setting, [point.layout for point in result.front]),
        roomiest=max(close, key=lambda plan: plan.headroom_bytes, default=None),
        simplest=min(close, key=_machinery, default=None),
        guide=_guide(question),
        nearest=plans_of(question.setting, [near.layout for near in result.nearest]),
        days=days,
        device_hours=days * 24 * question.setting.n_devices,
    )


def _distinct(best: Candidates) -> list[Layout]:
    """Layouts in rank order, each step time once, and once what differs in the number of recomputed layers only.

    An equal time is the simpler layout's; a neighbour in `layers=N` is the same plan for whoever chooses.
    """
    step = best.step_s
    differs = np.concatenate([[True], np.abs(np.diff(step)) > step[1:] * TIE])
    kept: dict[Layout, Layout] = {}
    for layout in (best.layouts.one(int(i)) for i in np.flatnonzero(differs)):
        kept.setdefault(replace(layout, recompute_layers=min(layout.recompute_layers, 1)), layout)
    return list(kept.values())


def _machinery(plan: Plan) -> tuple[int, float]:
    from cost_models.layout import Layouts

    return int(complexity(Layouts.of([plan.layout]))[0]), plan.step_time_s


def _guide(question: Question) -> GuideLayout:
    """The guide's layout, its data-parallel degree and accumulation following devices and batch."""
    setting = question.setting
    dp, left = divmod(setting.n_devices, GUIDE_TP * GUIDE_PP)
    if left or not dp:
        return GuideLayout(plan=None, reason=f"{setting.n_devices} devices are not a multiple of tp 4 x pp 4")
    zero = 2 if dp > 1 else 0
    layout = Layout(
        tp=GUIDE_TP,
        sp=True,
        pp=GUIDE_PP,
        dp=dp,
        dp_shard=dp,
        zero=zero,
        micro_batch=1,
        accumulation=max(setting.workload.global_batch // dp, 1),
        schedule="1f1b",
        recompute="full",
    )
    broken = violation(setting, layout)
    if broken:
        return GuideLayout(plan=None, reason=f"{broken.code}: {broken.reason}")
    return GuideLayout(plan=plans_of(setting, [layout])[0], reason="")
