"""`launch` and `--launch` from the command line: streams, exit codes, and that nothing starts unasked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.cli.errors import run

STUB = (
    "import os, sys\n"
    "print('step 1 of rank', os.environ['RANK'])\n"
    "print(os.environ['WORLD_SIZE'], *sys.argv[1:], file=sys.stderr)\n"
)


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_PLAN_DEVICE", "cpu")
    monkeypatch.setattr("runtime.device.usable_cores", lambda: 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a stub trainer, and a plan for 64 devices in `plan/`."""
    (tmp_path / "a_trainer.py").write_text(STUB, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan").mkdir()
    text = "model: {name: tiny}\ndistributed: {dp_size: 64}\ncluster: atlas-800t-a2\n"
    (tmp_path / "plan" / "config.yaml").write_text(text, encoding="utf-8")
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> tuple[str, str]:
    assert run(list(arguments)) == code
    found = capsys.readouterr()
    return found.out, found.err


def object_of(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> dict[str, Any]:
    out, _ = told(capsys, code, *arguments, "--json")
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found["schema"] == 1
    return dict(found)


def test_a_plan_for_more_devices_is_refused_with_what_would_do(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    out, err = told(capsys, 2, "launch", "plan")
    assert out == ""
    assert err.startswith("error[R720]: plan/config.yaml is for 64 devices (atlas-800t-a2), this machine has no NPU")
    assert "--local rehearses" in err
    assert "each of 8 nodes" in err
    assert sorted(path.name for path in folder.iterdir()) == ["a_trainer.py", "plan"]


def test_a_dry_run_shows_command_and_variables_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    out, _ = told(capsys, 0, "launch", "plan", "--set", "distributed.dp_size=8", "--dry-run", "--max-restarts", "2")
    assert "8 ranks on 2 CPU cores, shared (gloo)" in out
    assert "OMP_NUM_THREADS=77  (yours; ours would be 1)" in out
    assert "PYTHONSAFEPATH=1" in out
    assert "-m torch.distributed.run --nnodes=1" in out
    assert "--max-restarts=2" in out
    assert f"-m runtime.train --config {folder}/plan/config.yaml --set distributed.dp_size=8" in out
    assert out.endswith("nothing was started\n")
    assert not (folder / "output").exists()


def test_a_dry_run_in_json_is_one_object(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    found = object_of(capsys, 0, "launch", "plan", "--local", "--dry-run")["launch"]
    assert (found["ranks"], found["devices"]["kind"], found["dry_run"]) == (2, "cpu", True)
    assert found["command"][-1] == str(folder / "plan" / "local" / "config.yaml")
    assert found["variables"]["TITAN_PLAN_DEVICE"] == "cpu"


def test_nodes_are_shown_each_with_its_command(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    hosts = [f"n{index}" for index in range(8)]
    out, _ = told(capsys, 0, "launch", "plan", "--nodes", ",".join(hosts))
    for index, host in enumerate(hosts):
        assert f"# {host}\nenv " in out
        assert f"--node-rank={index} --rdzv-backend=static --master-addr=n0 --master-port=29500" in out
    assert out.count("HCCL_CONNECT_TIMEOUT=1800") == 8
    found = object_of(capsys, 0, "launch", "plan", "--nodes", "a,b")["launch"]
    assert [node["host"] for node in found["nodes"]] == ["a", "b"]
    assert sorted(path.name for path in folder.iterdir()) == ["a_trainer.py", "plan"]


@pytest.mark.parametrize("option", ["--local"])
def test_nodes_and_a_start_here_exclude_each_other(
    capsys: pytest.CaptureFixture[str], folder: Path, option: str
) -> None:
    _, err = told(capsys, 2, "launch", str(folder / "plan"), "--nodes", "a,b", option)
    assert err.startswith("error[C617]: ")
    assert option in err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("missing",), "C603"),
        ((".",), "C603"),
        (("plan", "--set", "training.lr"), "C616"),
        (("plan", "--set", "training.learning=1"), "C605"),
        (("plan", "--master-port", "70000"), "C617"),
        (("plan", "--nodes", "a,,b"), "C610"),
    ],
)
def test_bad_input_is_an_error_with_its_code(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: tuple[str, ...], code: str
) -> None:
    assert folder
    assert object_of(capsys, 2, "launch", *arguments)["error"]["code"] == code


def test_a_rehearsal_says_what_it_is_and_keeps_the_streams_apart(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    out, err = told(capsys, 0, "launch", "plan", "--local", "--module", "a_trainer")
    assert out == "step 1 of rank 0\n"
    assert "--local: tp1-pp1-dp2-mbs1-z0 in " in err
    assert "dp 64 -> 2" in err
    assert f"2 --config {folder}/plan/local/config.yaml" in err
    assert "done in " in err


def test_a_search_launches_its_best_plan_and_json_stays_one_object(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.launch.prepare.__kwdefaults__", _with_stub())
    options = ("--model", "tiny", "--npus", "2", "--cluster", "local", "--global-batch", "4", "--out", "run")
    found = object_of(capsys, 0, *options, "--launch")
    assert found["plans"]
    assert found["launch"]["config"] == str(folder / "run" / "config.yaml")
    assert (found["launch"]["exit_code"], found["launch"]["ranks"]) == (0, 2)
    assert found["launch"]["layout"] == found["plans"][0]["id"]


def _with_stub() -> dict[str, Any]:
    from runtime.launch import prepare

    return {**(prepare.__kwdefaults__ or {}), "module": "a_trainer"}


def test_a_search_for_more_devices_still_writes_its_plan_and_says_where(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    options = ("--model", "tiny", "--npus", "16", "--out", "run", "--launch")
    error = object_of(capsys, 2, *options)["error"]
    assert error["code"] == "R720"
    assert error["message"].endswith("; the plan is in run")
    assert (folder / "run" / "config.yaml").exists()
    out, err = told(capsys, 2, *options)
    assert "saved  run/" in out
    assert "the plan is in run" in err


def test_where_nothing_fits_nothing_is_launched(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    found = object_of(capsys, 1, "--model", "70B", "--npus", "2", "--global-batch", "2", "--out", "run", "--launch")
    assert "launch" not in found
    assert not (folder / "run" / "launch.sh").exists()


def test_a_hostile_runtime_in_the_working_folder_is_not_run(folder: Path) -> None:
    for name in ("runtime", "cost_models", "planner", "torch"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('was imported')", encoding="utf-8")
    (folder / "elsewhere").mkdir()
    (folder / "a_trainer.py").rename(folder / "elsewhere" / "a_trainer.py")
    environment = {**os.environ, "PYTHONPATH": str(folder / "elsewhere")}
    # -P as the installed script has it: its folder, not the working folder, is on the path.
    command = [sys.executable, "-P", "-c", "from planner.cli import main; main()"]
    done = subprocess.run(
        [*command, "launch", "plan", "--local", "-q", "--module", "a_trainer"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert (done.returncode, done.stdout) == (0, "step 1 of rank 0\n"), done.stderr
    assert "was imported" not in done.stderr
