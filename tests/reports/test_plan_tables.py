"""plans.csv and rejected.csv: one header, units in names, the numbers of the plans."""

from __future__ import annotations

import csv
import io

import pytest

from cost_models.layout import Layout
from cost_models.memory import CATEGORIES
from cost_models.plan import Plan, plans_of
from planner.question import ask
from reports.plan_tables import PLAN_COLUMNS, REJECTED_COLUMNS, Rejection, plans_csv, rejected_csv

GIB = 2**30
LAYOUTS = [
    Layout(
        tp=2, sp=True, dp=4, dp_shard=2, zero=1, micro_batch=1, accumulation=2, recompute="full", recompute_layers=2
    ),
    Layout(pp=2, dp=4, schedule="1f1b", accumulation=2, activation_offload=True),
]


def plans() -> tuple[Plan, ...]:
    return plans_of(ask(model="tiny", npus=8, global_batch=8).setting, LAYOUTS)


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_no_plans_are_a_header_alone() -> None:
    assert plans_csv([], "x") == ",".join(PLAN_COLUMNS) + "\n"
    assert rejected_csv([]) == ",".join(REJECTED_COLUMNS) + "\n"


def test_columns_are_named_once() -> None:
    assert len(set(PLAN_COLUMNS)) == len(PLAN_COLUMNS)


def test_each_plan_is_a_row_in_the_order_given() -> None:
    found = rows(plans_csv(plans(), "a calibration"))
    assert [row["rank"] for row in found] == ["1", "2"]
    assert [row["plan_id"] for row in found] == [layout.name for layout in LAYOUTS]
    assert {row["source"] for row in found} == {"a calibration"}
    assert {len(row) for row in found} == {len(PLAN_COLUMNS)}


def test_a_row_tells_the_layout() -> None:
    first, second = rows(plans_csv(plans(), ""))
    assert [first[name] for name in ("tp", "sp", "dp", "dp_shard", "zero", "accumulation")] == [
        "2",
        "1",
        "4",
        "2",
        "1",
        "2",
    ]
    assert first["recompute"] == "layers=2"
    assert [second[name] for name in ("pp", "schedule", "sp", "activation_offload")] == ["2", "1f1b", "0", "1"]
    assert second["recompute"] == "none"


def test_memory_is_in_gib_and_its_parts_sum_to_the_peak() -> None:
    for row, plan in zip(rows(plans_csv(plans(), "")), plans(), strict=True):
        assert float(row["peak_memory_gib"]) * GIB == pytest.approx(plan.peak_bytes, rel=1e-12)
        assert sum(float(row[f"{name}_gib"]) for name in CATEGORIES) == pytest.approx(float(row["peak_memory_gib"]))
        assert float(row["headroom_gib"]) * GIB == pytest.approx(plan.headroom_bytes, rel=1e-12)
        assert float(row["host_memory_per_node_gib"]) * GIB == pytest.approx(plan.host_bytes_per_node, rel=1e-12)


def test_exclusive_times_sum_to_the_step() -> None:
    for row, plan in zip(rows(plans_csv(plans(), "")), plans(), strict=True):
        parts = ("computing_s", "communication_not_overlapped_s", "bubble_s", "free_s")
        assert sum(float(row[name]) for name in parts) == pytest.approx(plan.step_time_s, rel=1e-9)
        assert float(row["step_time_s"]) == plan.step_time_s
        assert float(row["overlapped_s"]) == plan.communication_s["overlapped"]


def test_reasons_with_commas_and_quotes_survive() -> None:
    rejection = Rejection(code="D201", title="layers, split", layouts=3, example="tp1", reason='80 "layers", pp 3\nno')
    (row,) = rows(rejected_csv([rejection]))
    assert row == {
        "code": "D201",
        "title": "layers, split",
        "layouts": "3",
        "example": "tp1",
        "reason": rejection.reason,
    }
