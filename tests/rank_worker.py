"""What a rank of tests/ranks.py runs: cases from its connection, each under a process group of its own."""

from __future__ import annotations

import ctypes
import datetime as dt
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import runtime.assembly
import runtime.engine  # noqa: F401 - imported before the fork, so that it is paid once

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_COLLECTIVE_TIMEOUT = dt.timedelta(seconds=60)
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Fork a rank for each byte on stdin, until it closes."""
    address, folder = sys.argv[1:3]
    _die_with_parent()
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended ranks are reaped
    parent = os.getpid()
    while sys.stdin.buffer.read(1):
        if os.fork() == 0:
            _die_with_parent()
            if os.getppid() != parent:  # the template died between the fork and the line above
                os._exit(1)
            _serve(address, Path(folder))
            os._exit(0)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(address: str, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends us
    log = (folder / f"{os.getpid()}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=False)
    connection = Client(address, "AF_UNIX")
    connection.send(os.getpid())
    while True:
        try:
            case = pickle.loads(connection.recv_bytes())  # noqa: S301 - from the test that made us
        except EOFError:
            return
        _answer(connection, *case)


def _answer(connection: Connection, rank: int, world: int, store: str, name: tuple[str, str], arguments: Any) -> None:  # noqa: ANN401
    try:
        value = (True, _run(rank, world, store, name, arguments))
    except BaseException:  # noqa: BLE001 - whatever happened, the test is told
        value = (False, traceback.format_exc())
    finally:
        gc.collect()
    connection.send_bytes(pickle.dumps(value))


def _run(rank: int, world: int, store: str, name: tuple[str, str], arguments: Any) -> object:  # noqa: ANN401
    function = getattr(importlib.import_module(name[0]), name[1])
    if world == 1:
        return function(*arguments)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=_COLLECTIVE_TIMEOUT
    )
    try:
        found = function(*arguments)
        dist.barrier()  # who leaves early closes its connections to those who still read
        return found
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
