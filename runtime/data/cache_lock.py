"""One process of a machine builds the token cache, the others wait."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

_POLL_S: Final = 0.1
_TELL_S: Final = 30.0
_LOG: Final = logging.getLogger(__name__)


@contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Hold the lock file; wait while another process holds it.

    The kernel frees the lock of a process that died, so no age has to be guessed. Where a file system has no locks,
    all processes build: the result is put in place whole, and it is the same whoever built it.

    Yields:
        Whether no other process of this machine builds.

    Raises:
        OSError: the lock file cannot be written.
    """
    with path.open("a+", encoding="utf-8") as file:
        alone = _acquire(file, path)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield alone


def _acquire(file: IO[str], path: Path) -> bool:
    told = time.monotonic() - _TELL_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            _LOG.warning("%s: no locks on this file system (%s); every process tokenises", path, error.strerror)
            return False
        else:
            return True
        if time.monotonic() - told >= _TELL_S:
            told = time.monotonic()
            _LOG.info("waiting for the token cache: %s builds it", path.read_text(encoding="utf-8").strip() or path)
        time.sleep(_POLL_S)
