"""SIGTERM and SIGUSR1 set a flag, handlers come back, and a second SIGTERM does not wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime.faults import StopRequest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_a_wish_to_stop(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert (stop.requested, stop.signal_name) == (False, "")
        signal.raise_signal(number)
        assert (stop.requested, stop.signal_name) == (True, number.name)


def test_the_old_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    stop = StopRequest()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] != before
    stop.close()
    stop.close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_slurms_warning_and_its_end_are_one_request() -> None:
    """SIGUSR1 comes minutes before the limit and SIGTERM at it: the save that began is not cut short."""
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal_name == "SIGUSR1"


def test_only_the_main_thread_can_listen() -> None:
    caught: list[str] = []

    def listen() -> None:
        try:
            StopRequest()
        except ValueError as error:
            caught.append(str(error))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]


def test_a_second_sigterm_leaves_at_once() -> None:
    program = (
        "import os, threading, time\n"
        "from runtime.faults import StopRequest\n"
        "stop = StopRequest()\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('ready', flush=True)\n"
        "while not stop.requested: time.sleep(0.01)\n"
        "print('saving', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for word in ("ready", "saving"):
        assert process.stdout.readline().strip() == word
        os.kill(process.pid, signal.SIGTERM)
    _, told = process.communicate(timeout=20)
    assert process.returncode == 143
    assert told == "second SIGTERM: leaving at once, nothing is saved\n"
