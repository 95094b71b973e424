"""Two programs that take steps in turn: each step of one is measured beside one of the other, seconds apart.

Launches of one program differ by a tenth on a shared machine, which hides what a comparison is about. Here both
programs live at once and only one is awake: every rank says that it stands before a step and sleeps until it is told to
go on. A turn lasts from that word until the last rank stands before its next step, so that all that a step does between
two steps (data, log lines) is in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final

PLACE: Final = "TURNS_SOCKET"
"""Where a rank finds the one that tells whose turn it is."""
_CALL_S: Final = 180.0


def taking_turns(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step, made when it is this program's turn."""
    line: Connection | None = None

    def waiting(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever the step takes and gives
        nonlocal line
        line = line or Client(os.environ[PLACE], "AF_UNIX")
        line.send(None)
        line.recv()
        return step(*arguments, **named)

    return waiting


class Side:
    """The ranks of one program."""

    def __init__(self, place: Path, ranks: int) -> None:
        self.place, self._ranks = place, ranks
        self._listener = Listener(str(place), "AF_UNIX", backlog=ranks)
        self._lines: list[Connection] = []

    def meet(self) -> None:
        """Wait until every rank stands before its first step.

        Raises:
            TimeoutError: some rank did not come.
        """
        # The listener has no time limit of its own.
        self._listener._listener._socket.settimeout(_CALL_S)  # type: ignore[attr-defined]
        try:
            self._lines = [self._listener.accept() for _ in range(self._ranks)]
        except TimeoutError as late:
            raise TimeoutError(f"{self.place.name}: not all of {self._ranks} ranks came to a first step") from late
        self._stand()

    def turn(self) -> float:
        """Seconds of one step.

        Raises:
            EOFError: a rank has ended.
        """
        start = time.perf_counter()
        for line in self._lines:
            line.send(None)
        self._stand()
        return time.perf_counter() - start

    def _stand(self) -> None:
        for line in self._lines:
            if not line.poll(_CALL_S):
                raise TimeoutError(f"{self.place.name}: a step took over {_CALL_S:.0f} s")
            line.recv()

    def close(self) -> None:
        """Let go of the ranks, which then end."""
        for line in self._lines:
            line.close()
        self._listener.close()
