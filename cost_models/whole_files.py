"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from errno import EISDIR
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def write_whole(texts: Mapping[Path, str]) -> None:
    """Write all files or none: each is written beside its target, and only when all are there do they take their names.

    Raises:
        OSError: a target is a folder, or cannot be written.
    """
    for target in texts:
        if target.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(target))
    mode = 0o666 & ~_umask()
    staged: dict[Path, Path] = {}
    try:
        for target, text in texts.items():
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:64]}.", suffix=".tmp")
            staged[target] = Path(name)
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as stream:
                stream.write(text)
            staged[target].chmod(mode)
        for target, written in staged.items():
            written.replace(target)
    finally:
        for written in staged.values():
            written.unlink(missing_ok=True)


def _umask() -> int:
    """The process's umask, which mkstemp does not follow; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
