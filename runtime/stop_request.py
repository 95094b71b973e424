"""A polite end of a run: SIGTERM or SIGUSR1 asks for it, and the trainer saves and leaves after the step."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_HASTY: Final = (signal.SIGTERM, signal.SIGINT)
_AT_ONCE: Final = 128 + signal.SIGTERM
"""What a shell reports of a process that SIGTERM ended: 143."""


class StopRequest:
    """Listens for the wish to stop from its making until `close`.

    SIGTERM is what torchrun, Kubernetes and `kill` send; SIGUSR1 is what Slurm sends some time before the limit
    (`--signal=USR1@600`), SIGINT what Ctrl-C sends. SIGTERM or SIGINT for a second time ends the process at once with
    143 and saves nothing; one of each is what a terminal and torchrun send for one wish. Handlers can be set in the
    main thread only; elsewhere Python raises ValueError.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._counts = dict.fromkeys(_HASTY, 0)
        self._old: dict[signal.Signals, Any] = {number: signal.signal(number, self._note) for number in _SIGNALS}

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop; the ranks of a run are asked at different times, so they must agree."""
        return self._received is not None

    @property
    def signal_name(self) -> str:
        """The first signal that came, such as `SIGTERM`; empty where none did."""
        return "" if self._received is None else self._received.name

    def close(self) -> None:
        """Give the signals back to whoever had them; a second time does nothing."""
        while self._old:
            number, handler = self._old.popitem()
            # None: the old handler was set outside Python, and cannot be set back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        """A handler runs between any two instructions of the program, so it takes no lock and writes to no stream."""
        self._received = self._received or signal.Signals(number)
        if number not in self._counts:
            return
        name = signal.Signals(number)
        self._counts[name] += 1
        if self._counts[name] > 1:
            os.write(2, f"second {name.name}: leaving at once, nothing is saved\n".encode())
            # Not SystemExit: it would wait for threads, and a collective that hangs never returns to it.
            os._exit(_AT_ONCE)
