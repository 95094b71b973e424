"""The log line of a step: what it says, that lines stand under each other, and that it never gets long."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config_values import PlanSummary
from runtime.metrics import StepRecord
from runtime.step_line import step_line

RECORD = StepRecord(
    step=120,
    loss=2.34561,
    grad_norm=1.2345,
    learning_rate=1e-4,
    step_time_s=49.1,
    tokens_per_s_per_device=1234.4,
    mfu=0.4123,
    memory_gib=41.26,
)
PLAN = PlanSummary(version="0.1.0", layout="tp8-pp1-dp1-mbs1-z0", step_time_s=47.5, peak_bytes=1)
ANY = st.floats(allow_nan=True, allow_infinity=True)


def test_a_line_tells_all_that_was_promised() -> None:
    assert step_line(RECORD, PLAN, 1000) == (
        "step  120/1000  loss  2.3456  grad norm  1.2345  lr 1.00e-04    1,234 tok/s/device  MFU 41.2 %  41.3 GiB  "
        "plan 47.5 s, now 49.1, +3.4 %"
    )


def test_without_a_plan_the_time_stands_alone_and_without_a_peak_there_is_no_mfu() -> None:
    line = step_line(replace(RECORD, mfu=None), None, 1000)
    assert line.endswith("41.3 GiB  49.1 s")
    assert "MFU" not in line
    assert step_line(RECORD, replace(PLAN, step_time_s=0.0), 1000).endswith("  49.1 s")


@pytest.mark.parametrize(
    ("now", "end"),
    [
        (47.5, "now 47.5, +0.0 %"),
        (42.0, "now 42.0, -11.6 %"),
        (95.0, "now 95.0, +100.0 %"),
        (4750.0, "now 4750, x100"),
        (0.0475, "now 0.0475, x0.001"),
    ],
)
def test_the_plan_is_compared_by_percent_and_far_off_by_factor(now: float, end: str) -> None:
    assert step_line(replace(RECORD, step_time_s=now), PLAN, 1000).endswith(f"plan 47.5 s, {end}")


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"loss": float("nan")}, "loss     nan"),
        ({"loss": 12345.6}, "loss 1.2e+04"),
        ({"loss": 12.3456}, "loss  12.346"),
        ({"grad_norm": float("inf"), "skipped": True}, "grad norm     inf"),
        ({"grad_norm": 0.0}, "grad norm       0"),
        ({"grad_norm": 1.5e-5}, "grad norm 1.5e-05"),
        ({"tokens_per_s_per_device": 3.2}, "    3.2 tok/s/device"),
        ({"mfu": 0.00012}, "MFU 0.012 %"),
        ({"memory_gib": 0.25}, "0.25 GiB"),
        ({"memory_gib": 0.0}, "  0 GiB"),
        ({"skipped": True}, "+3.4 %  skipped"),
        ({"loss_scale": 65536.0}, "+3.4 %  scale 65536"),
        ({"balance_loss": 0.0123}, "+3.4 %  balance 0.0123"),
    ],
)
def test_odd_values_are_told(changes: dict[str, Any], shown: str) -> None:
    assert shown in step_line(replace(RECORD, **changes), PLAN, 1000)


def test_the_steps_of_a_run_stand_under_each_other() -> None:
    steps = [(1, 10.3765, 12.5, 980.0), (99, 2.3456, 0.9876, 1234.0), (1000, 0.9, 1.0, 1300.0)]
    lines = [
        step_line(replace(RECORD, step=s, loss=loss, grad_norm=g, tokens_per_s_per_device=t), PLAN, 1000)
        for s, loss, g, t in steps
    ]
    assert len({tuple(m.start() for m in re.finditer(r"loss|grad|lr|tok|MFU|GiB|plan", line)) for line in lines}) == 1


@given(
    record=st.builds(
        StepRecord,
        step=st.integers(1, 10**8),
        loss=ANY,
        grad_norm=ANY,
        learning_rate=st.floats(0, 1000),
        step_time_s=st.floats(0, 1e6),
        tokens_per_s_per_device=st.floats(0, 1e12) | st.sampled_from([float("nan"), float("inf")]),
        mfu=st.none() | st.floats(0, 2),
        memory_gib=st.floats(0, 9999),
        skipped=st.booleans(),
        loss_scale=st.none() | st.floats(1e-30, 1e30),
        balance_loss=st.none() | ANY,
    ),
    plan=st.none() | st.builds(lambda s: replace(PLAN, step_time_s=s), st.floats(1e-4, 1e6)),
)
@settings(max_examples=300, deadline=None)
def test_a_line_stays_one_line_below_160_columns(record: StepRecord, plan: PlanSummary | None) -> None:
    line = step_line(record, plan, 10**8)
    assert len(line) < 160
    assert line.isprintable()
