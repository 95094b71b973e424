"""Where steps are kept: `metrics.csv`, which programs read, and the same in TensorBoard.

Neither may end a run: a full disk is told once, and training goes on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Final

from cost_models.errors import TitanPlanError
from runtime.metrics import StepRecord
from runtime.metrics_tensorboard import TensorBoardFiles

COLUMNS: Final = (
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "step_time_s",
    "tokens_per_s_per_device",
    "mfu",
    "memory_gib",
)
"""Of metrics.csv, in this order; programs rely on them."""

CSV_NAME: Final = "metrics.csv"
PREVIOUS_NAME: Final = "metrics.previous.csv"
TENSORBOARD_NAME: Final = "tensorboard"
_HEADER: Final = (",".join(COLUMNS) + "\n").encode()
_LOG: Final = logging.getLogger(__name__)

Tell = Callable[[str], None]


class MetricsWriter:
    """Appends each step to `metrics.csv` and to TensorBoard; one process of a run has one.

    Args:
        output_dir: of the run; made where it is missing.
        resume_step: last step of the checkpoint that the run continues from: rows after it are of a life that ended,
            and are dropped. None for a run from its beginning: rows of another run move to `metrics.previous.csv`.
        tell: is given what cannot be written, once for each of the two; the log by default.

    Raises:
        TitanPlanError: R753, the folder cannot be made or written.
    """

    def __init__(self, output_dir: Path | str, *, resume_step: int | None, tell: Tell = _LOG.warning) -> None:
        folder = Path(output_dir)
        make_output_folder(folder)
        self._csv = _CsvFile(folder / CSV_NAME, resume_step, tell)
        self._tensorboard = TensorBoardFiles(folder / TENSORBOARD_NAME, (resume_step or 0) + 1, tell)

    def write(self, record: StepRecord) -> None:
        """Append a step; what is written before a process dies stays."""
        self._csv.write(record)
        self._tensorboard.write(record)

    def close(self) -> None:
        """Flush and close both; a second time does nothing."""
        self._csv.close()
        self._tensorboard.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _CsvFile:
    """metrics.csv, open from its first step on for as long as the disk takes it."""

    def __init__(self, path: Path, resume_step: int | None, tell: Tell) -> None:
        self._path, self._resume_step, self._tell = path, resume_step, tell
        self._file: FileIO | None = None
        self._size = 0
        self._told = False
        self._closed = False
        self._attempt(b"")

    def write(self, record: StepRecord) -> None:
        if not self._closed:
            self._attempt(csv_row(record).encode())

    def close(self) -> None:
        self._closed = True
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _attempt(self, row: bytes) -> None:
        """Each step tries again: the disk may have been cleared, and a gap in the curve is better than its end."""
        try:
            if self._file is None:
                prepare_csv(self._path, self._resume_step)
                self._file = FileIO(self._path, "ab")
                self._size = self._path.stat().st_size
            self._append(self._file, row)
        except OSError as error:
            if not self._told:
                self._told = True
                self._tell(f"{self._path} cannot be written: {error.strerror or error}; training goes on without")

    def _append(self, file: FileIO, row: bytes) -> None:
        """A row is there whole or not at all: half of one would run into the next."""
        left = row
        try:
            while left:
                left = left[file.write(left) :]  # a nearly full disk takes a part, and refuses the rest
        except OSError:
            with suppress(OSError):
                file.truncate(self._size)
            raise
        self._size += len(row)


def csv_row(record: StepRecord) -> str:
    """A line of metrics.csv. Every number reads back as the same float, so that two curves compare bit for bit."""
    values = (getattr(record, name) for name in COLUMNS[1:])
    # float() first: the repr of a NumPy float names its type.
    return ",".join([str(record.step), *("" if value is None else repr(float(value)) for value in values)]) + "\n"


def prepare_csv(path: Path, resume_step: int | None) -> None:
    """Leave a metrics.csv that the next row can be appended to.

    The file is replaced at once or not at all. One that is not ours, or of another run, is kept beside it under
    another name.
    """
    old = path.read_bytes() if path.is_file() else b""
    ours = old.startswith(_HEADER)
    if old and (not ours or (resume_step is None and old != _HEADER)):
        path.replace(path.with_name(PREVIOUS_NAME))
        ours = False
    kept = _rows_until(old.splitlines(keepends=True)[1:], resume_step or 0) if ours else ()
    new = b"".join([_HEADER, *kept])
    if new != old or not ours:
        _replace(path, new)


def _rows_until(lines: Iterable[bytes], step: int) -> list[bytes]:
    """The rows of steps up to this one; a torn or broken line is dropped."""
    return [line for line in lines if 0 < _step_of(line) <= step]


def _step_of(line: bytes) -> int:
    """The step of a whole row, 0 for anything else."""
    cells = line[:-1].split(b",")
    if not line.endswith(b"\n") or len(cells) != len(COLUMNS):
        return 0
    try:
        step = int(cells[0])
        for cell in cells[1:]:
            float(cell or b"nan")
    except ValueError:
        return 0
    return step


def _replace(path: Path, content: bytes) -> None:
    """Write whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def make_output_folder(folder: Path) -> None:
    """Make the folder of a run, or find it.

    Raises:
        TitanPlanError: R753, it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"output folder {folder} cannot be made: {error.strerror or error}"
        hint = "set training.output_dir to a folder that every rank may write"
        raise TitanPlanError("R753", message, hint, exit_code=3) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        message = f"output folder {folder} is not writable for this user"
        raise TitanPlanError("R753", message, "set training.output_dir to another folder, or chmod it", exit_code=3)
