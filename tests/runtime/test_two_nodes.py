"""Real launchers: torchrun on one node, on two that are both this machine, with restarts; and titan-plan's own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from runtime.checkpoint_files import whole_checkpoints
from runtime.launch_command import free_port
from tests.runtime.train_processes import MOST_S, TINY, Trainers, curve, environment, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GUIDE = Path(__file__).parents[2] / "configs" / "examples" / "llama70b-64npu-guide.yaml"
FP32 = (*TINY, "--precision", "fp32")
PLAN = (
    "model: {{name: tiny}}\ndistributed: {{dp_size: 2}}\ntraining: {{seq_len: 16, max_steps: 300, output_dir: {out}}}\n"
)


class Command:
    """A launcher in a session of its own, what it says in a file."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.log = folder / f"{time.monotonic_ns()}.log"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=folder, env=environment(),
                start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def code(self) -> int:
        try:
            return self.process.wait(MOST_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError(self.said) from None

    def wait_for(self, pattern: str) -> None:
        ends = time.monotonic() + MOST_S
        while not re.search(pattern, self.said):
            if time.monotonic() > ends or self.process.poll() is not None:
                raise TimeoutError(f"{pattern!r} was not said; said was:\n{self.said}")
            time.sleep(0.02)

    def ranks(self) -> list[psutil.Process]:
        """Those of the tree that train, by rank; pools of libraries are left out."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "runtime.train" in child.cmdline() and child.environ().get("RANK", "").isdecimal():
                found.setdefault(int(child.environ()["RANK"]), child)
        return [found[rank] for rank in sorted(found)]

    def end(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else ():
            child.kill()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def started() -> Iterator[list[Command]]:
    """Commands to be ended with the test."""
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.end()


def test_two_nodes_train_as_one_does(trainers: Trainers, tmp_path: Path, started: list[Command]) -> None:
    """The guide's command with --nnodes 2, node 1 first; both nodes are this machine."""
    port, options = free_port(), [*FP32, "--max-steps", 4, "--zero-stage", 2]
    for node in (1, 0):
        agent = ("--nnodes=2", f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}")
        command = torchrun(*options, "--output-dir", tmp_path / "two", agent=agent, world=1)
        started.append(Command(tmp_path, command))
    trainers.run([*options, "--output-dir", tmp_path / "one"], world=2)
    assert [command.code() for command in started] == [0, 0], [command.said for command in started]
    assert curve(tmp_path / "two") == curve(tmp_path / "one")
    assert len(curve(tmp_path / "two")) == 4
    assert "layout  tp1-pp1-dp2-mbs2-z2 on 2 cpu devices" in started[1].said


def test_a_killed_rank_is_restarted_and_training_goes_on_by_itself(
    trainers: Trainers, tmp_path: Path, started: list[Command]
) -> None:
    options = [*FP32, "--zero-stage", 0, "--max-steps", 60, "--set", "training.checkpoint.interval=5"]
    run = Command(tmp_path, torchrun(*options, "--output-dir", tmp_path / "out", agent=("--max-restarts=1",)))
    started.append(run)
    run.wait_for(r"step +12/60")
    run.ranks()[1].kill()
    assert run.code() == 0, run.said
    assert re.search(r"^resumed at step [1-9]\d*$", run.said, re.MULTILINE), run.said
    trainers.run([*options, "--output-dir", tmp_path / "undisturbed"], world=2)
    assert curve(tmp_path / "out") == curve(tmp_path / "undisturbed")


@pytest.mark.heavy
def test_without_restarts_a_killed_rank_ends_torchrun_and_nobody_is_left(
    tmp_path: Path, started: list[Command]
) -> None:
    run = Command(tmp_path, torchrun(*FP32, "--max-steps", 3000, "--output-dir", tmp_path / "out"))
    started.append(run)
    run.wait_for(r"step +5/3000")
    ranks = run.ranks()
    ranks[1].kill()
    assert run.code() == 1
    assert not psutil.wait_procs(ranks, timeout=10)[1]


@pytest.mark.heavy
def test_sigterm_to_torchrun_saves_and_the_same_command_goes_on(tmp_path: Path, started: list[Command]) -> None:
    options = [*FP32, "--zero-stage", 0, "--max-steps", 3000, "--output-dir", tmp_path / "out"]
    run = Command(tmp_path, torchrun(*options))
    started.append(run)
    run.wait_for(r"step +5/3000")
    run.process.send_signal(signal.SIGTERM)
    run.code()
    at = whole_checkpoints(tmp_path / "out" / "checkpoints")[0].record.step
    assert at >= 5
    assert f"stopped at step {at} as asked" in run.said
    again = Command(tmp_path, torchrun(*options, "--max-steps", at + 3))
    started.append(again)
    assert again.code() == 0
    assert f"resumed at step {at}" in again.said
    assert [int(step) for step, *_ in curve(tmp_path / "out")] == list(range(1, at + 4))


def titan_plan(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from planner.cli import main; main()", *map(str, arguments)]


def test_a_launched_plan_stops_with_130_when_asked_and_goes_on(tmp_path: Path, started: list[Command]) -> None:
    (tmp_path / "config.yaml").write_text(PLAN.format(out=tmp_path / "out"), encoding="utf-8")
    run = Command(tmp_path, titan_plan("launch", "config.yaml"))
    started.append(run)
    run.wait_for(r"step +3/300")
    run.process.send_signal(signal.SIGTERM)
    assert run.code() == 130, run.said
    at = whole_checkpoints(tmp_path / "out" / "checkpoints")[0].record.step
    assert "error[R710]: interrupted" in run.said
    assert "the same command goes on from the newest checkpoint" in run.said
    again = Command(tmp_path, titan_plan("launch", "config.yaml", "--set", f"training.max_steps={at + 2}"))
    started.append(again)
    assert again.code() == 0, again.said
    assert f"resumed at step {at}" in again.said


@pytest.mark.heavy
def test_a_launched_plan_that_goes_wrong_is_told_in_the_words_of_the_trainer(
    tmp_path: Path, started: list[Command]
) -> None:
    (tmp_path / "config.yaml").write_text(PLAN.format(out=tmp_path / "out"), encoding="utf-8")
    run = Command(tmp_path, titan_plan("launch", "config.yaml", "--set", "training.lr=1e30"))
    started.append(run)
    assert run.code() == 1
    assert re.search(r"error\[R721\]: rank \d failed: error\[R750\]: loss of step \d is not finite", run.said), run.said


@pytest.mark.heavy
def test_the_guide_is_rehearsed_here_and_refused_without_local(tmp_path: Path, started: list[Command]) -> None:
    (tmp_path / "guide.yaml").write_bytes(GUIDE.read_bytes())
    refused = Command(tmp_path, titan_plan("launch", "guide.yaml"))
    started.append(refused)
    assert refused.code() == 2
    assert "error[R720]: guide.yaml is for 64 devices" in refused.said
    assert "--local" in refused.said
    run = Command(tmp_path, titan_plan("launch", "guide.yaml", "--local"))
    started.append(run)
    assert run.code() == 0, run.said
    assert "step 10/10" in run.said


@pytest.mark.heavy
def test_a_search_trains_its_best_plan(tmp_path: Path, started: list[Command]) -> None:
    arguments = ("--model", "tiny", "--npus", 2, "--cluster", "local", "--global-batch", 4, "--out", "plan", "--launch")
    run = Command(tmp_path, titan_plan(*arguments))
    started.append(run)
    run.wait_for(r"step +3/")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.code() == 130, run.said
