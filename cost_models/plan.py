"""Plan: one layout with everything that was predicted for it, as plain numbers; what reports show and files hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cost_models.layout import Layout, Layouts
from cost_models.memory import CATEGORIES
from cost_models.prediction import Prediction, predict, usable_bytes

if TYPE_CHECKING:
    from cost_models.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout and its prediction.

    Attributes:
        step_time_low_s, step_time_high_s: 80 % interval.
        peak_bytes: of the worst rank; `memory_bytes` sum to it.
        headroom_bytes: device memory less the peak.
        time_s: exclusive parts of a step in the profiler's words; they sum to step_time_s.
        communication_s: exposed communication by dimension, and `overlapped`, which ran under compute.
        computing_s: of the computing, what recomputation and the optimizer's update took.
        worst_stage: pipeline rank with the peak.
        host_bytes_per_node: host memory that swap takes.
    """

    layout: Layout
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    tokens_per_s_per_device: float
    mfu: float
    hfu: float
    peak_bytes: int
    headroom_bytes: int
    p_fits: float
    memory_bytes: dict[str, int]
    time_s: dict[str, float]
    communication_s: dict[str, float]
    computing_s: dict[str, float]
    worst_stage: int
    host_bytes_per_node: int

    @property
    def id(self) -> str:
        """The layout's name."""
        return self.layout.name


def plans_of(setting: Setting, layouts: list[Layout]) -> tuple[Plan, ...]:
    """Predictions of some valid layouts."""
    if not layouts:
        return ()
    predicted = predict(setting, Layouts.of(layouts))
    return tuple(_plan(setting, layout, predicted, i) for i, layout in enumerate(layouts))


def _plan(setting: Setting, layout: Layout, p: Prediction, i: int) -> Plan:
    shape = p.step_time_s.shape

    def at(column: np.ndarray) -> float:
        return float(np.broadcast_to(column, shape)[i])

    categories = p.memory.by_category()
    memory = {name: round(at(categories[name])) for name in CATEGORIES}
    comm = {name: at(seconds) for name, seconds in p.time.communication_s.items()}
    time = {
        "computing": at(p.time.computing_s),
        "communication_not_overlapped": sum(comm.values()),
        "bubble": at(p.time.bubble_s),
        "free": at(p.time.free_s),
    }
    return Plan(
        layout=layout,
        step_time_s=at(p.step_time_s),
        step_time_low_s=at(p.step_time_low_s),
        step_time_high_s=at(p.step_time_high_s),
        tokens_per_s_per_device=at(p.tokens_per_s_per_device),
        mfu=at(p.mfu),
        hfu=at(p.hfu),
        peak_bytes=sum(memory.values()),
        headroom_bytes=usable_bytes(setting) - sum(memory.values()),
        p_fits=at(p.p_fits),
        memory_bytes=memory,
        time_s=time,
        communication_s={**comm, "overlapped": at(p.time.hidden_communication_s)},
        computing_s={"recompute": at(p.time.recompute_s), "optimizer": at(p.time.optimizer_s)},
        worst_stage=int(at(p.memory.worst_rank)),
        host_bytes_per_node=round(at(p.host_bytes_per_node)),
    )
