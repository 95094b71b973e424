"""The log line of a step: short, aligned from step to step, below 160 columns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from runtime.config_values import PlanSummary
    from runtime.metrics import StepRecord

WIDTH: Final = 159
"""Most columns of a line."""
_FAR_OFF: Final = 10.0


def step_line(record: StepRecord, plan: PlanSummary | None, total_steps: int) -> str:
    """The line of one step.

    Args:
        plan: what the step is compared with; None for a run without a prediction.
        total_steps: with which step the run ends; it sets the width of the step's number.
    """
    digits = len(str(total_steps))
    parts = [
        f"step {record.step:>{digits}}/{total_steps}",
        f"loss {_number(record.loss):>7}",
        f"grad norm {_number(record.grad_norm):>7}",
        f"lr {record.learning_rate:.2e}",
        f"{_rate(record.tokens_per_s_per_device):>7} tok/s/device",
        *([] if record.mfu is None else [f"MFU {_percent(record.mfu):>4} %"]),
        f"{_gib(record.memory_gib):>4} GiB",
        _time(record.step_time_s, plan),
    ]
    return _fitted(parts, _extras(record))


def _extras(record: StepRecord) -> list[str]:
    """What only some runs have, the most telling first."""
    extras = ["skipped"] if record.skipped else []
    extras += [] if record.loss_scale is None else [f"scale {record.loss_scale:g}"]
    return extras + ([] if record.balance_loss is None else [f"balance {_number(record.balance_loss)}"])


def _fitted(parts: list[str], extras: list[str]) -> str:
    """Join them; alignment gives way to numbers that are out of all bounds, and extras to a line without room."""
    line = "  ".join(parts)
    if len(line) > WIDTH:
        line = " ".join(line.split())
    for extra in extras:
        if len(line) + len(extra) + 2 <= WIDTH:
            line += f"  {extra}"
    return line


def _time(seconds: float, plan: PlanSummary | None) -> str:
    if plan is None or plan.step_time_s <= 0:
        return f"{_seconds(seconds)} s"
    ratio = seconds / plan.step_time_s
    # A plan for NPUs against a rehearsal on CPUs is off by orders of magnitude, which no percentage tells well.
    shown = f"{100 * (ratio - 1):+.1f} %" if 1 / _FAR_OFF < ratio < _FAR_OFF else f"x{ratio:.3g}"
    return f"plan {_seconds(plan.step_time_s)} s, now {_seconds(seconds)}, {shown}"


def _number(value: float) -> str:
    """Five digits: 2.3456, 12.346, or 1.2e-05."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.4g}"
    size = math.floor(math.log10(abs(value)))
    return f"{value:.{min(4 - size, 4)}f}" if -3 <= size <= 3 else f"{value:.1e}"


def _seconds(value: float) -> str:
    """Three digits, never below a tenth of a millisecond."""
    if not math.isfinite(value) or value <= 0 or value >= 1e6:
        return f"{value:.3g}"
    return f"{value:.{min(max(2 - math.floor(math.log10(value)), 0), 4)}f}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if 0.001 <= share < 10 else f"{100 * share:.2g}"


def _gib(value: float) -> str:
    return f"{value:.1f}" if 10 <= value < 1e5 else f"{value:.2f}" if 0.01 <= value < 10 else f"{value:.2g}"
