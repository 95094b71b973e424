"""One supervised process tree: signals are handed on, output is sorted, and nothing of it outlives the supervisor."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Final, TextIO

from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import FrameType

    import psutil

RANK_MARK: Final = "\x1e"
"""Before each line of a rank, by which its words are told from torchrun's own: a character that no log holds."""

_HANDED_ON: Final = {
    # SIGTERM is what the trainer saves on; SIGINT would only raise KeyboardInterrupt in each rank.
    signal.SIGINT: signal.SIGTERM,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,  # Slurm's `--signal=USR1@600`
}
# Slurm signals all processes of a job itself. torchrun takes a second signal as "at once", so we first look whether it
# has had its own.
_HAND_ON_AFTER_S: Final = 1.0
_STOPPING: Final = b"death signal, shutting down workers"

_TREE: Final = "TITAN_PLAN_LAUNCH"
_POLL_S: Final = 0.1
_LEAST_LOOKS, _MOST_LOOKS = 2, 20
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process tree ended.

    Attributes:
        exit_code: negative where a signal ended it.
        interrupted: it was asked to stop from outside.
    """

    exit_code: int
    interrupted: bool


@dataclass(slots=True)
class _Stop:
    """Requests to stop, as signals bring them; a handler does nothing more than write them down."""

    times: int = 0
    number: int = 0

    def note(self, number: int, _frame: FrameType | None) -> None:
        self.times, self.number = self.times + 1, number

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals that are handed on, except what this process was told to ignore, as by nohup."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in _HANDED_ON:
                if signal.getsignal(number) not in {signal.SIG_IGN, None}:
                    before[number] = signal.signal(number, self.note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(slots=True)
class _Tree:
    """A process, and its members: all that came of it, found by a mark in their environment whoever adopted them."""

    process: subprocess.Popen[bytes]
    mark: str
    known: set[psutil.Process] = field(default_factory=set)

    def members(self) -> set[psutil.Process]:
        import psutil

        with suppress(psutil.Error):
            self.known |= set(psutil.Process(self.process.pid).children(recursive=True))
        for other in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if other.pid not in {os.getpid(), self.process.pid} and other.environ().get(_TREE) == self.mark:
                    self.known.add(other)
        return {member for member in self.known if _runs(member)}

    def kill(self) -> None:
        """End all of it. Looks several times: one may have forked meanwhile, one that just starts has no mark yet."""
        import psutil

        self.process.kill()
        for look in range(_MOST_LOOKS):  # one that sleeps in a driver cannot be killed; it is not waited for
            members = self.members()
            if not members and look >= _LEAST_LOOKS:
                return
            for member in members:
                with suppress(psutil.Error):
                    member.kill()
            time.sleep(_POLL_S / 2)


def _runs(process: psutil.Process) -> bool:
    """Whether it is there, and is no zombie that its new parent has not reaped; a reused id is another process."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    own_log: Path,
    out: TextIO,
    err: TextIO,
    grace_s: float,
) -> Ended:
    """Run a command to its end.

    The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 is handed on; after `grace_s`, or at a second one, the whole tree is
    killed. If this process itself is killed, the command gets SIGTERM (Linux).

    Args:
        own_log: file for the lines without RANK_MARK, which are the command's own.
        out, err: where lines of ranks go.

    Raises:
        TitanPlanError: R722 (exit code 3) where the command cannot start, C603 where the log cannot be written.
    """
    mark, stop = uuid.uuid4().hex, _Stop()
    try:
        log = own_log.open("wb")
    except OSError as error:
        raise TitanPlanError("C603", f"cannot write {own_log}: {error.strerror}", "set training.output_dir") from error
    with log, stop.listening():
        process = _start(command, {**environment, _TREE: mark})
        tree = _Tree(process, mark)
        pumps = [_pump(process.stdout, out, log), _pump(process.stderr, err, log)]
        try:
            code = _wait(tree, stop, own_log, err, grace_s)
        finally:
            tree.kill()
            for pump in pumps:
                pump.join(5)
    return Ended(exit_code=code, interrupted=stop.times > 0 and code != 0)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603 - a list of arguments of our making
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            # A session of its own: Ctrl-C comes to us alone, and we hand it on once instead of everybody getting it.
            start_new_session=True,
            preexec_fn=_dies_with_us(),  # noqa: PLW1509 - one system call; no thread of ours runs yet
        )
    except OSError as error:
        message = f"cannot start {command[0]}: {error.strerror}"
        raise TitanPlanError("R722", message, "is this Python still installed?", exit_code=3) from error


def _dies_with_us() -> Callable[[], None] | None:
    """What the child does before it starts, so that the kernel sends it SIGTERM when we are gone."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)  # loaded here: after a fork nothing may be
    return lambda: library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _wait(tree: _Tree, stop: _Stop, own_log: Path, err: TextIO, grace_s: float) -> int:
    while not stop.times:
        with suppress(subprocess.TimeoutExpired):
            return tree.process.wait(_POLL_S)
    _put(err, f"stopping: ranks may save and end, for {grace_s:g} s at the most; once more ends them at once\n")
    since, handed_on = time.monotonic(), False
    while True:
        with suppress(subprocess.TimeoutExpired):
            return tree.process.wait(_POLL_S)
        passed = time.monotonic() - since
        if not handed_on and passed > _HAND_ON_AFTER_S:
            handed_on = True
            tree.members()  # whose parents end first would be lost sight of
            if _STOPPING not in own_log.read_bytes():
                tree.process.send_signal(_HANDED_ON[signal.Signals(stop.number)])
        if stop.times > 1 or passed > grace_s:
            tree.kill()


def _pump(stream: IO[bytes] | None, screen: TextIO, log: IO[bytes]) -> threading.Thread:
    """Sort the lines of a stream, in a thread, until it ends."""
    mark = RANK_MARK.encode()

    def sort() -> None:
        with stream or nullcontext(()) as lines:
            for line in lines:
                if mark in line:
                    # Half a line that was tailed too early is followed by its rest with a mark of its own.
                    _put(screen, line.replace(mark, b"").decode("utf-8", "replace"))
                else:
                    with suppress(ValueError):
                        log.write(line)
                        log.flush()

    thread = threading.Thread(target=sort, daemon=True)
    thread.start()
    return thread


def _put(screen: TextIO, text: str) -> None:
    """A reader that left is no reason to stop a training run."""
    with suppress(OSError, ValueError):
        screen.write(text)
        screen.flush()
