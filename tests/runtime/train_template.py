"""A process that has imported the trainer, and forks one for each order: importing torch is paid once a session.

An order is a line of JSON on stdin: `folder` (where `pid`, `out`, `err` and `code` are written), `arguments`,
`environ`, `cwd` and `fault` (a function of train_faults.py that breaks something in this process before it trains).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard

import runtime.trainer  # noqa: F401 - imported before the fork
from runtime import train

_PR_SET_PDEATHSIG = 1


def serve() -> None:
    """Fork for each line until stdin closes."""
    _die_with_parent()
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # watchers are reaped
    for line in iter(sys.stdin.readline, ""):
        if os.fork() == 0:
            _die_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch(json.loads(line))
            os._exit(0)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(order: dict[str, Any]) -> None:
    """Fork the trainer, and write down how it ends, however it does."""
    folder = Path(order["folder"])
    pid = os.fork()
    if pid == 0:
        _die_with_parent()
        _train(order, folder)
    _put(folder / "pid", str(pid))
    _, status = os.waitpid(pid, 0)
    _put(folder / "code", str(os.waitstatus_to_exitcode(status)))


def _train(order: dict[str, Any], folder: Path) -> None:
    """The trainer as `python -m runtime.train` runs it; ends by SystemExit, with all that Python does at its end."""
    for number, name in ((1, "out"), (2, "err")):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["cwd"])
    sys.argv = ["train.py", *order["arguments"]]
    if order["fault"]:
        from tests.runtime import train_faults

        getattr(train_faults, order["fault"])()
    sys.exit(train.main())


def _put(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    serve()
