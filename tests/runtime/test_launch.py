"""Launching for real with stub trainers, and what is checked before anything starts."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from cost_models.errors import TitanPlanError
from runtime.device import Devices
from runtime.launch import Job, LaunchEnd, config_file, launch, prepare, prepare_nodes

CPU = Devices(kind="cpu", backend="gloo", count=2, memory_bytes=2**35)
NPUS = Devices(kind="npu", backend="hccl", count=8, memory_bytes=2**36)
PLAN = "model: {name: tiny}\ndistributed: {dp_size: 2}\ntraining: {output_dir: OUT}\n"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    folder = tmp_path / "a run ü"
    folder.mkdir()
    text = PLAN.replace("OUT", json.dumps(str(tmp_path / "out put")))
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A trainer: rank 1 fails where STUB says so, all wait where it says so."""
    (tmp_path / "a_trainer.py").write_text(
        "import json, os, sys, time\n"
        "rank, what = os.environ['RANK'], os.environ.get('STUB')\n"
        "seen = {'arguments': sys.argv[1:], **{k: os.environ[k] for k in ('WORLD_SIZE', 'TITAN_PLAN_DEVICE')}}\n"
        "print(json.dumps(seen))\n"
        "print('log of', rank, file=sys.stderr)\n"
        "if what == 'fail' and rank == '1':\n"
        "    raise ValueError('boom at layer 3')\n"
        "if what == 'stopped':\n"
        "    sys.exit(130)\n"
        "if what == 'refuse':\n"
        "    print('error[R750]: no such group\\nhint: look at it', file=sys.stderr); sys.exit(3)\n"
        "if what in {'wait', 'fail'}:\n"
        "    open(f'up{rank}', 'w').close(); time.sleep(60)\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return "a_trainer"


def ended(job: Job) -> tuple[LaunchEnd, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return launch(job, out=out, err=err), out.getvalue(), err.getvalue()


def test_ranks_run_the_module_with_the_config_and_rank_0_is_shown(plan: Path, stub: str) -> None:
    job = prepare(plan, ["training.lr=1e-5"], devices=CPU, module=stub)
    end, out, err = ended(job)
    assert (end.exit_code, end.error) == (0, None)
    (line,) = out.splitlines()
    seen = json.loads(line)
    config = str(plan.resolve() / "config.yaml")
    assert seen["arguments"] == ["--config", config, "--set", "training.lr=1e-5"]
    assert (seen["WORLD_SIZE"], seen["TITAN_PLAN_DEVICE"]) == ("2", "cpu")
    assert err == "log of 0\n"
    assert [path.read_text() for path in sorted(end.logs.rglob("1/stderr.log"))] == ["log of 1\n"]


def test_the_rank_that_fails_is_named_with_its_error(plan: Path, stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB", "fail")
    end, _, err = ended(prepare(plan, devices=CPU, module=stub))
    assert end.error is not None
    assert (end.exit_code, end.error.code) == (1, "R721")
    assert end.error.message == "rank 1 failed: ValueError: boom at layer 3"
    log = Path(end.error.hint.removeprefix("all it said is in "))
    assert "boom at layer 3" in log.read_text(encoding="utf-8")
    assert "ChildFailedError" not in err


def test_a_trainer_that_ends_before_training_hands_its_code_on(
    plan: Path, stub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB", "refuse")
    end, _, _ = ended(prepare(plan, devices=CPU, module=stub))
    assert end.error is not None
    assert (end.exit_code, end.error.code) == (3, "R721")
    assert end.error.message.endswith("failed: error[R750]: no such group")
    assert end.error.hint.startswith("look at it; ")


def test_ranks_that_were_stopped_by_somebody_else_are_an_interrupted_run(
    plan: Path, stub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a scheduler that signals the ranks itself."""
    monkeypatch.setenv("STUB", "stopped")
    end, _, _ = ended(prepare(plan, devices=CPU, module=stub))
    assert end.error is not None
    assert (end.exit_code, end.error.code) == (130, "R710")


def test_a_module_that_is_not_there_is_a_launch_that_failed(plan: Path, stub: str) -> None:
    end, _, _ = ended(prepare(plan, devices=CPU, module=f"{stub}_that_is_not_there"))
    assert end.error is not None
    assert (end.exit_code, end.error.code) == (3, "R722")


def test_an_interrupted_run_leaves_no_process(
    plan: Path, stub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB", "wait")

    def stop() -> None:
        while not ((tmp_path / "up0").exists() and (tmp_path / "up1").exists()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    end, _, err = ended(prepare(plan, devices=CPU, module=stub))
    thread.join()
    assert end.error is not None
    assert (end.exit_code, end.error.code) == (130, "R710")
    assert "newest checkpoint" in end.error.hint
    assert "stopping: " in err
    config = str(plan.resolve() / "config.yaml")
    assert [p.pid for p in psutil.process_iter() if config in _command(p)] == []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    ("override", "devices", "code"),
    [
        ("distributed.dp_size=64", NPUS, "R720"),
        ("distributed.dp_size=9", CPU, "R720"),
        ("distributed.pp_size=3", CPU, "D201"),
        ("training.lr=fast", CPU, "C606"),
    ],
)
def test_what_breaks_a_rule_or_is_too_much_is_refused_before_anything_starts(
    plan: Path, override: str, devices: Devices, code: str
) -> None:
    with pytest.raises(TitanPlanError) as caught:
        prepare(plan, [override], devices=devices)
    assert (caught.value.code, caught.value.exit_code) == (code, 2)


def test_a_port_that_is_taken_is_named(plan: Path) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        with pytest.raises(TitanPlanError, match=rf"R723.*port {port} "):
            prepare(plan, devices=CPU, master_port=port)


def test_a_plan_is_a_run_folder_or_a_file(plan: Path, tmp_path: Path) -> None:
    assert config_file(plan) == config_file(plan / "config.yaml") == plan / "config.yaml"
    (tmp_path / "empty").mkdir()
    with pytest.raises(TitanPlanError, match="holds no config"):
        config_file(tmp_path / "empty")
    with pytest.raises(TitanPlanError, match="C603"):
        prepare(tmp_path / "missing", devices=CPU)


def test_logs_that_cannot_be_written_are_told(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "out put").write_text("in the way", encoding="utf-8")
    with pytest.raises(TitanPlanError, match="C603"):
        launch(prepare(plan, devices=CPU))


def test_nodes_get_the_variables_of_the_planned_devices_not_of_this_machine(plan: Path) -> None:
    text = "cluster: atlas-800t-a2\nmodel: {name: tiny}\ndistributed: {dp_size: 16, comm_algorithm: NHR}\n"
    (plan / "config.yaml").write_text(text, encoding="utf-8")
    commands, variables = prepare_nodes(plan, ["n1", "n2"])
    assert len(commands) == 2
    assert all("--nproc-per-node=8" in command for command in commands)
    assert variables["HCCL_ALGO"] == "level0:NA;level1:NHR"
    assert variables["TITAN_PLAN_DEVICE"] == "npu"
    assert "OMP_NUM_THREADS" not in variables
