"""Cases: rows of a measured run table beside what is predicted for them, and the sweeps they form."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .run_table import Refusal, Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .evaluate import EvaluatedTable, Evaluation

# Tables whose memory is what the device reports (nvidia-smi), and what the allocator of the last rank logs; in all
# others it is the peak of torch's allocator on the worst rank.
_DEVICE_MEMORY = frozenset({"bigscience-tr11", "bigscience-v100", "dlperf-oneflow"})
_LAST_RANK_MEMORY = frozenset({"megatron-lm-ci-golden"})
# What rows of one sweep share: they differ in layout only.
_SWEEP = (
    "source model hidden layers heads seq n_devices global_batch precision device flash_attention "
    "inter_node_gb_per_s_per_device"
)
_SHOWN = (
    "model n_devices tp sp pp vpp dp cp ep zero_stage_or_distopt schedule micro_batch global_batch recompute precision"
)
SMALLEST_SWEEP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured run and its prediction.

    Attributes:
        label: the row's identity, model and layout in words.
        sweep: what rows of one sweep share.
        layout: its layout spelled out; empty where it was not read.
        outcome: `ok` or `oom`, as measured.
        time_s, memory_gib: (predicted, measured); None where either is absent.
    """

    identity: str
    source: str
    label: str
    sweep: tuple[str, ...]
    layout: str
    outcome: str
    evaluation: Evaluation
    time_s: tuple[float, float] | None
    memory_gib: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Runs that differ in layout only: a layout that was measured more than once stands once, with its median.

    Attributes:
        label: what the runs have in common.
        times_s: (predicted, measured) of each layout.
        fits: whether the layout is predicted to fit.
    """

    source: str
    label: str
    times_s: tuple[tuple[float, float], ...]
    fits: tuple[bool, ...]


def cases_of(evaluated: EvaluatedTable) -> tuple[Case, ...]:
    """The rows of a measured table as cases, in order."""
    table = evaluated.table
    keys = [name.strip().lower() for name in table.header]
    rows = (dict(zip(keys, map(str.strip, row), strict=True)) for row in table.rows)
    parts = zip(rows, table.runs, evaluated.evaluations, strict=True)
    return tuple(_case(row, run, evaluation) for row, run, evaluation in parts)


def sweeps_of(cases: Sequence[Case]) -> tuple[Sweep, ...]:
    """The sweeps of SMALLEST_SWEEP or more layouts, as the reference planners were judged, in order of the table."""
    by_layout: dict[tuple[str, ...], dict[str, list[Case]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        if case.time_s:
            by_layout[case.sweep][case.layout].append(case)
    return tuple(_sweep(layouts) for layouts in by_layout.values() if len(layouts) >= SMALLEST_SWEEP)


def _sweep(layouts: dict[str, list[Case]]) -> Sweep:
    each = list(layouts.values())
    return Sweep(
        source=each[0][0].source,
        label=" ".join(
            text if name == "model" else f"{name}={text}"
            for name, text in zip(_SWEEP.split(), each[0][0].sweep, strict=True)
            if text and name not in {"source", "device"}
        ),
        times_s=tuple(_median_pair(members) for members in each),
        fits=tuple(bool(members[0].evaluation.fits) for members in each),
    )


def _median_pair(members: list[Case]) -> tuple[float, float]:
    pairs = [case.time_s for case in members if case.time_s]
    return statistics.median(p for p, _ in pairs), statistics.median(m for _, m in pairs)


def _case(row: dict[str, str], run: Run | Refusal, evaluation: Evaluation) -> Case:
    source = row.get("source", "")
    return Case(
        identity=row.get("id", ""),
        source=source,
        label=_label(row),
        sweep=tuple(row.get(name, "") for name in _SWEEP.split()),
        layout=run.layout.name if isinstance(run, Run) else "",
        outcome=row.get("outcome", "") or "ok",
        evaluation=evaluation,
        time_s=_pair(evaluation.step_time_s, _measured_step_s(row)),
        memory_gib=_pair(_predicted_gib(source, evaluation), _positive(row.get("peak_mem_gib", ""))),
    )


def _pair(predicted: float | None, measured: float | None) -> tuple[float, float] | None:
    return None if predicted is None or measured is None else (predicted, measured)


def _predicted_gib(source: str, evaluation: Evaluation) -> float | None:
    if source in _LAST_RANK_MEMORY:
        return evaluation.last_rank_gib
    return evaluation.device_gib if source in _DEVICE_MEMORY else evaluation.allocated_gib


def _measured_step_s(row: dict[str, str]) -> float | None:
    """The step time as published, or from tokens a second and device, or from samples a second."""
    step = _positive(row.get("step_time_s", ""))
    if step is not None:
        return step
    batch, seq, devices = (_positive(row.get(name, "")) for name in ("global_batch", "seq", "n_devices"))
    tokens = _positive(row.get("tokens_per_s_per_device", ""))
    if batch and seq and devices and tokens:
        return batch * seq / (tokens * devices)
    samples = _positive(row.get("samples_per_s", ""))
    return batch / samples if batch and samples else None


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _label(row: dict[str, str]) -> str:
    """Model and layout, `name=value` for what the row gives and is not 1 or none."""
    given = [(name, row.get(name, "")) for name in _SHOWN.split()]
    return " ".join(
        value if name == "model" else f"{name}={value}" for name, value in given if value not in {"", "1", "none"}
    )
