"""A supervised tree: its lines go where they belong, signals reach it, and nothing of it is left."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from cost_models.errors import TitanPlanError
from runtime.launch_process import RANK_MARK, Ended, supervise

ORPHAN = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
ORPHAN += "start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid, file=open('pid', 'w'))"


def run(code: str, folder: Path, *, grace_s: float = 5.0) -> tuple[Ended, str, str]:
    out, err = io.StringIO(), io.StringIO()
    command = [sys.executable, "-c", f"import os\nos.chdir({str(folder)!r})\n{code}"]
    ended = supervise(command, os.environ, own_log=folder / "own.log", out=out, err=err, grace_s=grace_s)
    return ended, out.getvalue(), err.getvalue()


def signal_soon(*numbers: int, when: Path) -> threading.Thread:
    """Send signals to this process, one each 0.3 s, once a file is there."""

    def send() -> None:
        while not when.exists():
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_lines_of_ranks_are_shown_without_their_mark_and_all_others_are_kept(tmp_path: Path) -> None:
    ended, out, err = run(
        "import sys\n"
        f"print({RANK_MARK!r} + 'from rank 0')\n"
        "print('from torchrun')\n"
        f"print({RANK_MARK!r} + 'half ' + {RANK_MARK!r} + 'a line', file=sys.stderr)\n"
        "sys.stderr.buffer.write(b'\\xff no text\\n')\n",
        tmp_path,
    )
    assert ended == Ended(exit_code=0, interrupted=False)
    assert (out, err) == ("from rank 0\n", "half a line\n")
    assert sorted((tmp_path / "own.log").read_bytes().splitlines()) == [b"from torchrun", b"\xff no text"]


def test_the_exit_code_is_handed_back(tmp_path: Path) -> None:
    assert run("raise SystemExit(7)", tmp_path)[0].exit_code == 7
    assert run("os.kill(os.getpid(), 9)", tmp_path)[0].exit_code == -9


def test_a_grandchild_in_a_session_of_its_own_does_not_outlive_the_run(tmp_path: Path) -> None:
    ended, _, _ = run(ORPHAN, tmp_path)
    assert ended.exit_code == 0
    assert is_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_comes_to_the_child_as_the_one_that_trainers_save_on(tmp_path: Path, number: int) -> None:
    code = (
        "import signal, sys, time\n"
        "def save(number, frame):\n"
        "    open('saved', 'w').write(str(number)); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, save); open('up', 'w').close(); time.sleep(60)"
    )
    sender = signal_soon(number, when=tmp_path / "up")
    before = signal.getsignal(number)
    ended, _, err = run(code, tmp_path, grace_s=30)
    sender.join()
    assert ended == Ended(exit_code=1, interrupted=True)
    assert (tmp_path / "saved").read_text() == str(int(signal.SIGTERM))
    assert "once more ends them at once" in err
    assert signal.getsignal(number) is before


def test_slurms_signal_stays_what_it_is(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3)); open('up', 'w').close(); time.sleep(60)"
    )
    sender = signal_soon(signal.SIGUSR1, when=tmp_path / "up")
    assert run(code, tmp_path, grace_s=30)[0] == Ended(exit_code=3, interrupted=True)
    sender.join()


def test_a_child_that_says_that_it_is_stopping_is_not_told_again(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print('Received 15 death signal, shutting down workers', flush=True); open('up', 'w').close()\n"
        "time.sleep(2); sys.exit(4)"
    )
    sender = signal_soon(signal.SIGTERM, when=tmp_path / "up")
    assert run(code, tmp_path, grace_s=30)[0].exit_code == 4
    sender.join()


DEAF = (
    "import signal, time\n"
    "for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(n, signal.SIG_IGN)\n"
    f"{ORPHAN}\n"
    "open('up', 'w').close(); time.sleep(60)"
)


def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    sender = signal_soon(signal.SIGINT, signal.SIGINT, when=tmp_path / "up")
    started = time.monotonic()
    ended, _, _ = run(DEAF, tmp_path, grace_s=60)
    sender.join()
    assert time.monotonic() - started < 10
    assert ended == Ended(exit_code=-9, interrupted=True)
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_child_that_does_not_hear_is_killed_after_the_grace(tmp_path: Path) -> None:
    sender = signal_soon(signal.SIGTERM, when=tmp_path / "up")
    assert run(DEAF, tmp_path, grace_s=1.2)[0] == Ended(exit_code=-9, interrupted=True)
    sender.join()
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_signal_that_is_ignored_as_by_nohup_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        sender = signal_soon(signal.SIGHUP, when=tmp_path / "up")
        ended, _, _ = run("open('up', 'w').close()\nimport time; time.sleep(1)", tmp_path)
        sender.join()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended == Ended(exit_code=0, interrupted=False)


def test_the_child_ends_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    child = "import os, time; open('up', 'w').write(str(os.getpid())); time.sleep(60)"
    program = (
        "import os, sys, pathlib\nfrom runtime.launch_process import supervise\n"
        f"supervise([sys.executable, '-c', {child!r}], os.environ, own_log=pathlib.Path('own.log'), "
        "out=sys.stdout, err=sys.stderr, grace_s=5)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path) as supervisor:
        up = tmp_path / "up"
        while not (up.exists() and up.read_text()):
            time.sleep(0.02)
        supervisor.kill()
    until = time.monotonic() + 5
    while not is_gone(int(up.read_text())) and time.monotonic() < until:
        time.sleep(0.05)
    assert is_gone(int(up.read_text()))


def test_a_reader_that_left_does_not_stop_the_run(tmp_path: Path) -> None:
    closed = io.StringIO()
    closed.close()
    command = [sys.executable, "-c", f"print({RANK_MARK!r} + 'x'); print('end')"]
    ended = supervise(command, os.environ, own_log=tmp_path / "own.log", out=closed, err=closed, grace_s=5)
    assert ended.exit_code == 0
    assert (tmp_path / "own.log").read_bytes() == b"end\n"


def test_a_command_that_does_not_exist_is_a_launch_that_failed(tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(TitanPlanError) as caught:
        supervise(["/no/such/python"], {}, own_log=tmp_path / "own.log", out=out, err=out, grace_s=1)
    assert (caught.value.code, caught.value.exit_code) == ("R722", 3)


def test_a_log_that_cannot_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(TitanPlanError, match="C603"):
        supervise(["/no/such/python"], {}, own_log=tmp_path / "no" / "own.log", out=out, err=out, grace_s=1)
