"""The folder of checkpoints on disk: each checkpoint is a folder that is there whole, or is passed over.

A checkpoint is written as `step-00000500.partial`; its titan_plan.json comes last, with the size of every other file,
then the folder is renamed. One that is replaced or too old is renamed to `.trash` before it is deleted, so that what
bears a good name is never half gone.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cost_models.errors import TitanPlanError

from .checkpoint_record import RECORD, Record, check_fits, read_record, record_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from .config_values import TrainConfig

PARTIAL: Final = ".partial"
TRASH: Final = ".trash"
_NAME: Final = re.compile(r"step-\d{8,12}")
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A whole checkpoint."""

    path: Path
    record: Record


def checkpoint_folder(config: TrainConfig) -> Path:
    """Where the run keeps its checkpoints."""
    training = config.training
    return Path(training.checkpoint.path) if training.checkpoint.path else Path(training.output_dir) / "checkpoints"


def check_checkpoint(config: TrainConfig) -> None:
    """Refuse, before any process group is made, to resume from a checkpoint that does not fit the config.

    Raises:
        TitanPlanError: C618 for another model, C619 for another optimizer or format, R754 for an unreadable folder.
    """
    if config.training.checkpoint.resume:
        found = whole_checkpoints(checkpoint_folder(config))
        if found:
            check_fits(found[0].record, found[0].path, config)


def whole_checkpoints(folder: Path, tell: Callable[[str], None] | None = None) -> list[Found]:
    """The checkpoints of a folder, newest first.

    Args:
        tell: is told of each that is passed over because it is not whole.
    """
    found: list[Found] = []
    for path in _listed(folder):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            found.append(Found(path=path, record=_whole(path)))
        except (OSError, ValueError) as error:
            if tell is not None:
                tell(f"checkpoint {path} is not whole and is passed over: {error}")
    return sorted(found, key=lambda one: (one.record.serial, one.record.step), reverse=True)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        message = f"checkpoints of {folder} cannot be listed: {error.strerror}"
        raise TitanPlanError("R754", message, "it must be a folder that this user may read") from error


def _whole(path: Path) -> Record:
    """The record of a checkpoint whose files are all there at their full size."""
    record = read_record(path / RECORD)
    for name, size in record.files.items():
        got = (path / name).stat().st_size
        if got != size:
            raise ValueError(f"{name} has {got} bytes instead of {size}")
    return record


def clean(folder: Path) -> None:
    """Remove what a killed run left; a checkpoint that only lacked its last renaming gets its name."""
    for path in _listed(folder):
        if path.suffix == PARTIAL and _NAME.fullmatch(path.stem):
            with suppress(OSError, ValueError):
                _whole(path)
                if not path.with_suffix("").exists():
                    path.rename(path.with_suffix(""))
                    _sync_folder(folder)
                    continue
            _remove(path)
        elif path.suffix == TRASH and _NAME.fullmatch(path.stem):
            _remove(path)


def partial_of(folder: Path, step: int) -> Path:
    """Where a checkpoint is written; made, and empty."""
    partial = folder / f"step-{step:08d}{PARTIAL}"
    _remove(partial)
    partial.mkdir(parents=True)
    return partial


def sizes_of(partial: Path, expected: list[str]) -> dict[str, int]:
    """Bytes of every file that has been written.

    Raises:
        TitanPlanError: R756 where a rank's file is missing: it was written to a disk that this node does not see.
    """
    for name in expected:
        if not (partial / name).exists():
            message = f"{name} was written by another node, and is not in {partial} here"
            hint = "training.output_dir, or training.checkpoint.path, must be on a disk that all nodes share"
            raise TitanPlanError("R756", message, hint, exit_code=1)
    files = sorted(path for path in partial.rglob("*") if path.is_file() and path.name != RECORD)
    return {str(path.relative_to(partial)): path.stat().st_size for path in files}


def put_in_place(partial: Path, record: Record) -> Path:
    """Write the record, and give the checkpoint its name; it is on the disk when this returns."""
    with (partial / RECORD).open("w", encoding="utf-8") as file:
        file.write(record_text(record))
        file.flush()
        os.fsync(file.fileno())
    for folder in (*(path for path in partial.iterdir() if path.is_dir()), partial):
        _sync_folder(folder)
    final = partial.with_suffix("")
    if final.exists():
        # Between the two renamings the step is there as `.partial` alone, which `clean` would finish.
        _to_trash(final)
    partial.rename(final)
    _sync_folder(final.parent)
    return final


def trim(folder: Path, keep: int, run: str) -> None:
    """Remove the older checkpoints of this run beyond `keep`; those of other runs stay."""
    own = [found for found in whole_checkpoints(folder) if found.record.run == run]
    for found in own[keep:]:
        _to_trash(found.path)
    for path in _listed(folder):
        if path.suffix == TRASH and _NAME.fullmatch(path.stem):
            _remove(path)


def discard(partial: Path) -> None:
    """Give back the room of a checkpoint that failed."""
    shutil.rmtree(partial, ignore_errors=True)


def _to_trash(path: Path) -> None:
    trash = path.with_suffix(TRASH)
    _remove(trash)
    path.rename(trash)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _sync_folder(folder: Path) -> None:
    """New names in a folder survive a loss of power only once the folder itself is written."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
