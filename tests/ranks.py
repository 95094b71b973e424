"""A pool of worker processes that play the ranks of one test case after the other.

Importing torch is what a rank costs, so it is paid once: a template process imports it and forks the ranks. They
live until the session ends, a case fails, or too many threads are left in them, and are then replaced.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_RANKS = 8
_ROOT = Path(__file__).parents[1]
_START_S = 120.0
_GRACE_S = 2.0
_MOST_THREADS = 64
"""gloo's threads outlive their groups: with hundreds of them idle a rank is ten times slower."""


@dataclass(slots=True, eq=False)
class _Worker:
    connection: Connection
    pid: int
    log: Path


class RankError(AssertionError):
    """A case failed: what each rank that failed said."""


class RankPool:
    """Ranks 0 to 7 of this machine, made when a case first asks for them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._template: subprocess.Popen[bytes] | None = None
        self._listener: Listener | None = None
        self._workers: list[_Worker] = []
        self._cases = 0

    def run(self, world: int, function: Callable[..., Any], *arguments: object, timeout_s: float = 120.0) -> list[Any]:
        """Call a module-level function on each of `world` ranks under a fresh gloo group; none for a world of one.

        Returns:
            What each rank returned, by rank. Arguments and results are pickled.

        Raises:
            RankError: with the traceback of each rank that failed; for a hang, with where each rank stood.
        """
        self._grow(world)
        self._cases += 1
        store = Path(self._folder.name) / f"store-{self._cases}"
        name = (function.__module__, function.__qualname__)
        for rank, worker in enumerate(self._workers[:world]):
            # Not `send`: with torch's reducers it would pass tensors by shared memory, between related processes only.
            worker.connection.send_bytes(pickle.dumps((rank, world, str(store), name, arguments)))
        answers, told = self._answers(world, timeout_s)
        store.unlink(missing_ok=True)
        if told:
            # Even ranks that all answered keep halves of groups that broke off, and can fail to form the next one.
            told |= self._replace(world, set(answers) | set(told))
            raise RankError("\n".join(f"--- rank {rank} of {world}\n{text}" for rank, text in sorted(told.items())))
        if any(psutil.Process(worker.pid).num_threads() > _MOST_THREADS for worker in self._workers):
            self._end_workers()
        return [answers[rank] for rank in range(world)]

    def _answers(self, world: int, timeout_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        """What ranks returned, and what those that failed say; once one failed the others get a short grace."""
        ranks = {worker.connection: rank for rank, worker in enumerate(self._workers[:world])}
        answers: dict[int, Any] = {}
        told: dict[int, str] = {}
        end = time.monotonic() + timeout_s
        while ranks and (left := end - time.monotonic()) > 0:
            for connection in wait(list(ranks), left):
                assert isinstance(connection, Connection)
                rank = ranks.pop(connection)
                try:
                    fine, value = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own process
                except (EOFError, ConnectionError):
                    fine, value = False, "Died:\n" + self._log(rank)
                (answers if fine else told)[rank] = value
                if not fine:
                    end = min(end, time.monotonic() + _GRACE_S)
        if ranks and not told:
            told[min(ranks.values())] = f"no answer within {timeout_s:.0f} s"
        return answers, told

    def _replace(self, world: int, done: set[int]) -> dict[int, str]:
        """End all workers; where those stood that had not answered."""
        silent = [rank for rank in range(world) if rank not in done]
        for rank in silent:
            with suppress(ProcessLookupError):
                os.kill(self._workers[rank].pid, signal.SIGUSR1)  # its faulthandler writes the stacks
        time.sleep(0.3 if silent else 0.0)
        stood = {rank: "stood at\n" + self._log(rank) for rank in silent}
        self._end_workers()
        return stood

    def _log(self, rank: int) -> str:
        return self._workers[rank].log.read_text(errors="replace")[-6000:]

    def _grow(self, world: int) -> None:
        assert world <= MOST_RANKS
        if self._listener is None or self._template is None:
            self._listener = Listener(str(Path(self._folder.name) / "socket"), "AF_UNIX")
            self._template = subprocess.Popen(
                [sys.executable, "-m", "tests.rank_worker", str(self._listener.address), self._folder.name],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _loopback()},
            )
        assert self._template.stdin is not None
        for _ in range(world - len(self._workers)):
            self._template.stdin.write(b"f")
            self._template.stdin.flush()
            self._workers.append(self._accepted(self._listener))

    def _accepted(self, listener: Listener) -> _Worker:
        """The worker that was just forked; a template that died is told instead of waited for."""
        socket = listener._listener._socket  # type: ignore[attr-defined]
        socket.settimeout(_START_S)
        connection = listener.accept()
        pid = connection.recv()
        return _Worker(connection, pid, Path(self._folder.name) / f"{pid}.log")

    def _end_workers(self) -> None:
        for worker in self._workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            worker.connection.close()
        self._workers = []

    def close(self) -> None:
        """End everything; the template and its forks also end when this process does, however it ends."""
        self._end_workers()
        if self._listener is not None:
            self._listener.close()
        if self._template is not None:
            self._template.kill()
            self._template.wait()
            if self._template.stdin is not None:
                self._template.stdin.close()
        self._folder.cleanup()


def _loopback() -> str:
    return "lo" if sys.platform == "linux" else "lo0"
