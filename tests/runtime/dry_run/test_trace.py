"""A dry run's memory as a trace that chrome://tracing opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cost_models.errors import TitanPlanError
from runtime.dry_run.trace import trace_events, write_trace
from runtime.dry_run.values import CATEGORIES, DryRun, Moment


def a_run(rank: int, *totals: int) -> DryRun:
    """A run whose timeline holds these bytes of weights, and one of activations beside them."""
    rest = dict.fromkeys(CATEGORIES, 0) | {"activations": 1}
    moments = tuple(Moment(at=3 * i, n_bytes={**rest, "weights": total}) for i, total in enumerate(totals))
    return DryRun(
        rank=rank,
        peak_bytes=max(totals, default=0) + 1,
        memory_bytes=dict.fromkeys(CATEGORIES, 0),
        moment="update, outside the model",
        largest=(),
        parameter_bytes=0,
        gradient_bytes=0,
        optimizer_bytes=0,
        host_bytes=0,
        forward_flops=0.0,
        backward_flops=0.0,
        messages=(),
        timeline=moments,
        seconds=0.0,
    )


def test_each_moment_is_a_counter_that_stacks_to_the_live_bytes() -> None:
    counters = [event for event in trace_events([a_run(0, 5, 9, 2)]) if event["ph"] == "C"]
    assert [event["ts"] for event in counters] == [0, 3, 6]
    assert [sum(event["args"].values()) for event in counters] == [6, 10, 3]
    assert {event["name"] for event in counters} == {"live bytes"}
    assert all(tuple(event["args"]) == CATEGORIES for event in counters)


def test_ranks_are_processes_with_names() -> None:
    events = trace_events([a_run(0, 1), a_run(12, 1)])
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [name.partition(",")[0] for name in names.values()] == ["rank 0", "rank 12"]
    assert {event["pid"] for event in events} == {0, 12}


def test_the_file_is_a_list_as_the_ascend_profiler_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "trace_view.json"
    path.write_text("old", encoding="utf-8")
    write_trace([a_run(0, 1, 2)], path)
    assert json.loads(path.read_text(encoding="utf-8")) == trace_events([a_run(0, 1, 2)])
    assert [found.name for found in tmp_path.iterdir()] == ["trace_view.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace_view.json"
    path.write_text("old", encoding="utf-8")

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cost_models.whole_files.os.fdopen", full)
    with pytest.raises(TitanPlanError, match="No space left"):
        write_trace([a_run(0, 1)], path)
    assert path.read_text(encoding="utf-8") == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["trace_view.json"]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TitanPlanError) as raised:
        write_trace([], tmp_path / "none" / "trace.json")
    assert raised.value.code == "C603"


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_trace([a_run(0, 1)], tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text(encoding="utf-8")) == trace_events([a_run(0, 1)])
