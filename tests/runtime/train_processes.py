"""Runs of the trainer as processes of their own: forked ranks for most tests, a real torchrun for some."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.launch_command import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]
MOST_S = 150.0
TINY = ("--model-name", "tiny", "--dataset-name", "demo", "--seq-len", "16", "--batch-size", "2", "--lr", "1e-3")
"""A run without a file whose steps take some 20 ms."""


def environment(**more: str) -> dict[str, str]:
    """Of a process that trains on this CPU, without what a launcher around the tests may have set."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TITAN_PLAN_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    fixed = {"TITAN_PLAN_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONWARNINGS": "default"}
    return {**kept, **fixed, "TITAN_PLAN_TIMEOUT_S": "100", **more}


def rows(output: Path) -> list[dict[str, str]]:
    """The rows of a run's metrics.csv."""
    with (output / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def curve(output: Path) -> list[tuple[str, str, str]]:
    """Step, loss and norm as they stand in metrics.csv: its numbers read back as the same floats."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(output)]


@dataclass(frozen=True)
class Rank:
    """One process of a run."""

    folder: Path

    @property
    def pid(self) -> int:
        return int(_soon(self.folder / "pid"))

    @property
    def said(self) -> str:
        """All of stderr so far."""
        path = self.folder / "err"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def answered(self) -> str:
        """All of stdout so far."""
        return (self.folder / "out").read_text(encoding="utf-8")

    @property
    def code(self) -> int:
        """Its exit code, negative for a signal; waits for the end."""
        try:
            return int(_soon(self.folder / "code"))
        except TimeoutError:
            self.send(signal.SIGKILL)
            raise TimeoutError(f"still running after {MOST_S} s; it said:\n{self.said}") from None

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait_for(self, text: str, most_s: float = MOST_S) -> None:
        """Until it has said this."""
        ends = time.monotonic() + most_s
        while text not in self.said:
            ended = (self.folder / "code").exists()
            if (ended and text not in self.said) or time.monotonic() > ends:
                raise TimeoutError(f"{text!r} was not said; said was:\n{self.said}")
            time.sleep(0.01)


def _soon(path: Path) -> str:
    ends = time.monotonic() + MOST_S
    while not path.exists():
        if time.monotonic() > ends:
            raise TimeoutError(str(path))
        time.sleep(0.01)
    return path.read_text()


@dataclass
class Trainers:
    """Starts trainers; `folder` is for what they say."""

    folder: Path
    _template: subprocess.Popen[str] | None = None
    _ranks: list[Rank] = field(default_factory=list)

    def start(
        self,
        arguments: Sequence[object],
        *,
        world: int = 1,
        cwd: Path | None = None,
        fault: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> list[Rank]:
        """Start the ranks of a run, with the variables that torchrun would set."""
        port = str(free_port())
        ranks = []
        for rank in range(world):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            meet = {**own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if world > 1 else {}
            ranks.append(self._order(arguments, cwd, fault, {**meet, **(environ or {})}))
        return ranks

    def run(
        self,
        arguments: Sequence[object],
        *,
        world: int = 1,
        cwd: Path | None = None,
        fault: str = "",
        environ: Mapping[str, str] | None = None,
        code: int = 0,
    ) -> list[Rank]:
        """Start the ranks, wait for them all, and see that they end with this code."""
        ranks = self.start(arguments, world=world, cwd=cwd, fault=fault, environ=environ)
        codes = [rank.code for rank in ranks]
        assert codes == [code] * world, [rank.said for rank in ranks]
        return ranks

    def _order(self, arguments: Sequence[object], cwd: Path | None, fault: str, environ: dict[str, str]) -> Rank:
        if self._template is None:
            self._template = subprocess.Popen(
                [sys.executable, "-m", "tests.runtime.train_template"],
                stdin=subprocess.PIPE, text=True, cwd=ROOT, env=environment(),
            )  # fmt: skip
        folder = self.folder / f"rank-{len(self._ranks)}"
        folder.mkdir()
        order = {
            "folder": str(folder),
            "arguments": [str(argument) for argument in arguments],
            "environ": environment(**environ),
            "cwd": str(cwd or folder),
            "fault": fault,
        }
        assert self._template.stdin is not None
        self._template.stdin.write(json.dumps(order) + "\n")
        self._template.stdin.flush()
        self._ranks.append(Rank(folder))
        return self._ranks[-1]

    def close(self) -> None:
        """End them all."""
        if self._template is not None:
            self._template.kill()
            self._template.wait()
            if self._template.stdin is not None:
                self._template.stdin.close()


def torchrun(*arguments: object, agent: Sequence[str] = (), world: int = 2) -> list[str]:
    """The command of the users' guide, up to what is given."""
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world}", *agent]
    if not any(part.startswith(("--master_port", "--rdzv")) for part in agent):
        start.append(f"--master_port={free_port()}")
    return [*start, "-m", "runtime.train", *map(str, arguments)]
