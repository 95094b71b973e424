"""The memory of dry runs as counters of a Chrome trace, for chrome://tracing, Perfetto and MindStudio Insight."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cost_models.errors import TitanPlanError
from cost_models.whole_files import write_whole

from .values import CATEGORIES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .values import DryRun

_COUNTER = "live bytes"


def trace_events(runs: Sequence[DryRun]) -> list[dict[str, Any]]:
    """One process a rank, with one stacked counter: bytes by category.

    A dry run has no clock: one operator takes one microsecond of the trace.
    """
    events: list[dict[str, Any]] = []
    for run in runs:
        name = f"rank {run.rank}, dry run, 1 us = 1 operator"
        events.append({"name": "process_name", "ph": "M", "pid": run.rank, "tid": 0, "args": {"name": name}})
        events.append(
            {"name": "process_sort_index", "ph": "M", "pid": run.rank, "tid": 0, "args": {"sort_index": run.rank}}
        )
        for moment in run.timeline:
            args = {category: moment.n_bytes[category] for category in CATEGORIES}
            events.append({"name": _COUNTER, "ph": "C", "pid": run.rank, "tid": 0, "ts": moment.at, "args": args})
    return events


def write_trace(runs: Sequence[DryRun], path: Path) -> None:
    """Write the file, whole or not at all; a link stays one.

    The outermost value is a list, as in the `trace_view.json` of the Ascend profiler.

    Raises:
        TitanPlanError: C603.
    """
    path = path.resolve()
    try:
        write_whole({path: json.dumps(trace_events(runs))})
    except (OSError, ValueError) as error:
        raise _refused(path, getattr(error, "strerror", None) or str(error)) from error


def _refused(path: Path, why: str) -> TitanPlanError:
    return TitanPlanError("C603", f"cannot write {str(path)[:80]}: {why}", "name a file in a folder that exists")
