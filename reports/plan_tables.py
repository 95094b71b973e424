"""plans.csv and rejected.csv: columns with units, UTF-8, one header."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cost_models.memory import CATEGORIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cost_models.plan import Plan

_GIB = float(2**30)
_LAYOUT_COLUMNS = (
    "tp", "sp", "cp", "cp_kind", "ep", "pp", "vpp", "dp", "dp_shard", "zero", "micro_batch", "accumulation", "schedule",
    "reduce_gradients", "swap_optimizer", "activation_offload", "placement",
)  # fmt: skip
PLAN_COLUMNS = (
    "rank", "plan_id", *_LAYOUT_COLUMNS, "recompute", "step_time_s", "step_time_low_s", "step_time_high_s",
    "tokens_per_s_per_npu", "mfu", "hfu", "peak_memory_gib", *(f"{name}_gib" for name in CATEGORIES), "headroom_gib",
    "p_fits", "worst_stage", "host_memory_per_node_gib", "computing_s", "communication_not_overlapped_s",
    "overlapped_s", "bubble_s", "free_s", "source",
)  # fmt: skip
REJECTED_COLUMNS = ("code", "title", "layouts", "example", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Layouts that one rule, or memory, ruled out, with one of them as an example."""

    code: str
    title: str
    layouts: int
    example: str
    reason: str


def plans_csv(plans: Iterable[Plan], source: str) -> str:
    """The text of plans.csv, in the order given.

    Args:
        source: where the constants of the prediction come from.
    """
    return _table(PLAN_COLUMNS, ([rank, *_plan_cells(plan), source] for rank, plan in enumerate(plans, start=1)))


def rejected_csv(rejections: Iterable[Rejection]) -> str:
    """The text of rejected.csv."""
    return _table(REJECTED_COLUMNS, ([r.code, r.title, r.layouts, r.example, r.reason] for r in rejections))


def _plan_cells(plan: Plan) -> list[object]:
    layout = [getattr(plan.layout, name) for name in _LAYOUT_COLUMNS]
    memory = [plan.memory_bytes[name] / _GIB for name in CATEGORIES]
    time = plan.time_s
    return [
        plan.id,
        *(int(value) if isinstance(value, bool) else value for value in layout),
        plan.layout.recompute_text,
        plan.step_time_s,
        plan.step_time_low_s,
        plan.step_time_high_s,
        plan.tokens_per_s_per_device,
        plan.mfu,
        plan.hfu,
        plan.peak_bytes / _GIB,
        *memory,
        plan.headroom_bytes / _GIB,
        plan.p_fits,
        plan.worst_stage,
        plan.host_bytes_per_node / _GIB,
        time["computing"],
        time["communication_not_overlapped"],
        plan.communication_s["overlapped"],
        time["bubble"],
        time["free"],
    ]


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
