"""The steps of a run as TensorBoard event files; where it is missing or fails, the run goes on without."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from runtime.metrics import StepRecord

_SCALARS: Final = (
    "loss",
    "grad_norm",
    "learning_rate",
    "step_time_s",
    "tokens_per_s_per_device",
    "mfu",
    "memory_gib",
    "loss_scale",
    "balance_loss",
)
"""Named as the columns of metrics.csv; a value that a run does not have makes no chart."""
_FLUSH_S: Final = 15


class TensorBoardFiles:
    """One event file for each life of a run.

    Args:
        folder: event files of earlier lives stay in it.
        first_step: of this life. TensorBoard hides what earlier lives wrote from it on.
        tell: is given, once, why there is nothing in TensorBoard.
    """

    def __init__(self, folder: Path, first_step: int, tell: Callable[[str], None]) -> None:
        self._folder, self._tell = folder, tell
        self._writer: Any = None
        try:
            self._writer = _summary_writer()(str(folder), purge_step=first_step, flush_secs=_FLUSH_S)
        # A TensorBoard that does not match its protobuf or NumPy fails at import in any of a dozen ways.
        except Exception as error:  # noqa: BLE001
            self._give_up(error)

    def write(self, record: StepRecord) -> None:
        """Add a step to every chart."""
        if self._writer is None:
            return
        values = {name: getattr(record, name) for name in _SCALARS}
        try:
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, float(value), record.step)
            self._writer.add_scalar("skipped", float(record.skipped), record.step)
        except (OSError, ValueError) as error:
            self._give_up(error)

    def close(self) -> None:
        """Flush and close; a second time does nothing."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """A file that was cut in the middle of an event cannot be continued."""
        writer, self._writer = self._writer, None
        with contextlib.suppress(Exception):
            if writer is not None:
                writer.close()
        self._tell(f"no TensorBoard in {self._folder}: {error or type(error).__name__}; training goes on without")


def _summary_writer() -> Any:  # noqa: ANN401 - torch's writer is untyped
    with warnings.catch_warnings():
        # Of TensorBoard's own imports (pkg_resources, distutils, generated protobuf code), which no user can act on.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter
