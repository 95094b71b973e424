"""`dry-run` from the command line: streams, exit codes, what it refuses, and one real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from planner.answer_json import tool_name
from planner.cli.errors import run

if TYPE_CHECKING:
    from pathlib import Path

PIPELINE = """
model: {name: tiny}
training: {batch_size: 4, micro_batch_size: 1}
distributed: {dp_size: 2, pp_size: 2}
optimization: {zero_stage: 1}
cluster: atlas-800t-a2
"""
ONE = "model: {name: tiny}\ntraining: {batch_size: 1}\ncluster: atlas-800t-a2\n"
PLAN = "plan: {{version: {version}, layout: {layout}, step_time_s: 1.0, peak_bytes: 1}}\n"
BAD = [
    (("none.yaml",), "C603", "none.yaml"),
    (("empty",), "C603", "config.yaml"),
    (("text.yaml",), "C6", "text.yaml"),
    (("unknown-key.yaml",), "C605", "tp_sise"),
    (("uneven.yaml",), "D2", "pp3"),
    (("old.yaml",), "C627", "0.0.1"),
    (("pipeline.yaml", "--rank", "4"), "C610", "0 to 3"),
    (("pipeline.yaml", "--rank", "-1"), "C610", "0 to 3"),
    (("pipeline.yaml", "--rank", "first"), "C617", "--rank"),
    (("pipeline.yaml", "--rank", "0", "--all-stages"), "C617", "--all-stages"),
    (("pipeline.yaml", "--trace", "none/trace.json"), "C603", "none/trace.json"),
    (("pipeline.yaml", "--trace", "empty"), "C603", "empty"),
    (("pipeline.yaml", "--trace", "pipeline.yaml"), "C603", "pipeline.yaml"),
    (("pipeline.yaml", "--trace", "queue"), "C603", "queue"),
    (("pipeline.yaml", "--trace", "x" * 300), "C603", "xxx"),
    ((), "C617", "PLAN"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "queue")
    texts = {
        "pipeline": PIPELINE,
        "one": ONE,
        "text": "a plan",
        "unknown-key": f"{ONE}distributed: {{tp_sise: 2}}\n",
        "uneven": PIPELINE.replace("pp_size: 2", "pp_size: 3, dp_size: 1").replace("dp_size: 2, ", ""),
        "old": ONE + PLAN.format(version="titan-plan 0.0.1", layout="tp1-pp1-dp1-mbs1-z0"),
        "edited": ONE + PLAN.format(version=tool_name(), layout="tp2-pp1-dp1-mbs1-z0"),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    return tmp_path


def object_of(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> dict[str, Any]:
    found = run(["dry-run", *arguments, "--json"])
    told = capsys.readouterr()
    assert found == code, told
    assert told.out.count("\n") == 1
    return dict(json.loads(told.out))


@pytest.mark.parametrize(("arguments", "code", "named"), [pytest.param(*bad, id=" ".join(bad[0])) for bad in BAD])
def test_bad_input_is_told_with_code_and_hint(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: str, named: str
) -> None:
    assert run(["dry-run", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"error[{code}")
    assert "\nhint: " in told.err
    assert named in told.err
    assert "Traceback" not in told.err
    error = object_of(capsys, 2, *arguments)["error"]
    assert error["code"].startswith(code)


def test_a_refusal_does_not_wait_for_torch() -> None:
    program = (
        "import sys\nfrom planner.cli.errors import run\n"
        "assert run(['dry-run', 'pipeline.yaml', '--rank', '9']) == 2\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


def test_prediction_and_trainer_stand_side_by_side(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code = run(["dry-run", "pipeline.yaml", "--rank", "2", "--trace", "trace.json", "--json"])
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert told.out.count("\n") == 1
    assert told.err == "running a step of rank 2 of 4 ...\n"
    assert code == (1 if found["problems"] else 0)
    assert (found["schema"], found["rank"], found["stage"]) == (1, 2, 1)
    predicted, dry = found["predicted"], found["dry_run"]
    assert predicted.keys() <= dry.keys()
    for key in ("parameter_bytes", "gradient_bytes"):
        assert predicted[key] == dry[key] > 0
    assert predicted["memory_bytes"].keys() == dry["memory_bytes"].keys()
    assert sum(dry["memory_bytes"].values()) == dry["peak_bytes"]
    assert sum(dry["transient_bytes"].values()) == dry["memory_bytes"]["transient"]
    messages = {(*m["dimensions"], m["kind"]): (m["group"], m["count"], m["bytes"]) for m in dry["collectives"]}
    # Two micro batches: hidden states come from the first stage, gradients go back.
    assert messages["pp", "recv"][:2] == messages["pp", "send"][:2] == ([0, 2], 2)
    assert messages["dp_shard", "reduce_scatter"][0] == [2, 3]
    assert 1 <= len(dry["largest"]) <= 10
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    assert max(sum(event["args"].values()) for event in trace if event["ph"] == "C") == dry["peak_bytes"]


def test_all_stages_are_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["dry-run", "pipeline.yaml", "--all-stages", "-q"])
    told = capsys.readouterr()
    assert code in {0, 1}
    assert told.err == ""
    assert "rank 0 of 4" in told.out or "rank 2 of 4" in told.out
    assert "peak of live tensors" in told.out
    rows = [line.split() for line in told.out.splitlines()]
    assert [row[:2] for row in rows if row[:2] in (["0", "0"], ["1", "2"])] == [["0", "0"], ["1", "2"]]


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Dry runs that find what was predicted; the ranks that were asked for."""
    from planner.dry_setting import setting_of
    from tests.planner.dry_runs import a_run

    asked: list[int] = []

    def run_one(config: Any, rank: int) -> object:  # noqa: ANN401
        asked.append(rank)
        return a_run(config.layout, setting_of(config).setting, rank)

    monkeypatch.setattr("planner.cli.dry_run._run_one", run_one)
    return asked


def test_the_worst_rank_is_taken_and_said(capsys: pytest.CaptureFixture[str], canned: list[int]) -> None:
    assert run(["dry-run", "pipeline.yaml"]) == 0
    out = capsys.readouterr().out
    assert f"rank {canned[0]} of 4, pipeline stage {canned[0] // 2} of 2, the worst by prediction" in out
    assert "it fits; prediction and trainer agree within 0.0" in out
    assert "not in it: communication buffers" in out


def test_a_run_folder_is_a_plan(capsys: pytest.CaptureFixture[str], folder: Path, canned: list[int]) -> None:
    (folder / "empty" / "config.yaml").write_text(PIPELINE, encoding="utf-8")
    assert object_of(capsys, 0, "empty", "--rank", "3")["rank"] == 3
    assert canned == [3]


def test_all_stages_as_json_are_a_list(capsys: pytest.CaptureFixture[str], canned: list[int]) -> None:
    found = object_of(capsys, 0, "pipeline.yaml", "--all-stages")
    assert found["schema"] == 1
    assert [one["rank"] for one in found["ranks"]] == [0, 2] == canned


def test_an_edited_plan_is_noted_and_run(capsys: pytest.CaptureFixture[str], canned: list[int]) -> None:
    assert run(["dry-run", "edited.yaml"]) == 0
    assert "note: edited.yaml was planned as tp2-pp1-dp1-mbs1-z0" in capsys.readouterr().err
    assert run(["dry-run", "edited.yaml", "-q"]) == 0
    assert capsys.readouterr().err == ""
    assert canned == [0, 0]


@pytest.mark.usefixtures("canned")
def test_a_contradiction_ends_with_1_and_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.dry_compare.TOLERANCE", -1.0)
    assert run(["dry-run", "one.yaml"]) == 1
    assert "rank 0: the prediction contradicts the trainer" in capsys.readouterr().out
    found = object_of(capsys, 1, "one.yaml")
    assert len(found["problems"]) == 1


def test_ctrl_c_ends_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.cli.dry_run._run_one", stop)
    assert run(["dry-run", "one.yaml", "--trace", "trace.json"]) == 130
    assert "error[R710]" in capsys.readouterr().err


def test_a_trace_never_takes_the_place_of_what_is_no_file_of_its_own(folder: Path) -> None:
    (folder / "queue-link").symlink_to(folder / "queue")
    (folder / "plan-link").symlink_to(folder / "one.yaml")
    for name in ("queue", "queue-link", "plan-link", "one.yaml"):
        assert run(["dry-run", "one.yaml", "--trace", name]) == 2
    assert (folder / "queue").is_fifo()
    assert (folder / "one.yaml").read_text(encoding="utf-8") == ONE


def test_a_reader_that_leaves_early_is_no_contradiction() -> None:
    """The shell's `| head`: the pipe is closed before anything is written."""
    program = "import sys; from planner.cli.errors import run; sys.exit(run(['dry-run', 'one.yaml', '-q']))"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
