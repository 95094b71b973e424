"""Checkpoints of a run: written beside training, whole or not at all; read back under any layout."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Final

import torch

from cost_models.errors import TitanPlanError
from runtime.parallel.trainable import publish

from .checkpoint_files import (
    Found,
    check_checkpoint,
    clean,
    discard,
    partial_of,
    put_in_place,
    sizes_of,
    trim,
    whole_checkpoints,
)
from .checkpoint_ranks import Ranks
from .checkpoint_record import Record, check_fits
from .checkpoint_state import TrainingState
from .checkpoint_storage import file_of, read_parts, unreadable, write_parts
from .error_texts import shorten_text
from .faults import connection_error, disk_full, is_connection_error

if TYPE_CHECKING:
    from pathlib import Path

    from .assembly import Assembly
    from .checkpoint_storage import Part
    from .config_values import CheckpointOptions, TrainConfig
    from .device import TrainDevice
    from .engine import Engine

__all__ = ["Checkpoints", "Found", "Progress", "check_checkpoint"]

_DISK_FULL: Final = "R752"
_FAILED: Final = 1
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run had come.

    Attributes:
        position: sequences consumed, whatever the layout.
        seed, seq_len, dataset_digest: of the run that wrote; the position means the same sequences only with these.
        layout: name of the layout that wrote.
    """

    step: int
    position: int
    seed: int
    seq_len: int
    dataset_digest: str
    layout: str


class Checkpoints:
    """The checkpoints of one run. All ranks make it, and call each method, at the same time.

    A save that does not fit the disk is told, and training goes on: the checkpoint before it is whole. Any other failed
    save ends the run at the next `save` or `finish`. All ranks decide alike.

    Args:
        folder: on a disk that all nodes share.
    """

    def __init__(
        self,
        folder: Path,
        options: CheckpointOptions,
        config: TrainConfig,
        engine: Engine,
        assembly: Assembly,
        device: TrainDevice,
    ) -> None:
        self.folder = folder.absolute()
        self._options, self._config = options, config
        self._engine, self._assembly, self._device = engine, assembly, device
        self._state = TrainingState(config, engine, assembly, device)
        self._ranks = Ranks(alone=assembly.groups is None)
        self._run = secrets.token_hex(8)
        self._thread: threading.Thread | None = None
        self._error: TitanPlanError | None = None
        self._failed: TitanPlanError | None = None
        self._in_flight: int | None = None
        self._saved: int | None = None
        self._ranks.first(lambda: clean(self.folder))

    def newest(self) -> Found | None:
        """The newest whole checkpoint as rank 0 sees it; None for none."""
        found = self._ranks.first(lambda: next(iter(whole_checkpoints(self.folder, _LOG.warning)), None))
        # Nodes may have mounted the shared disk at different places.
        return None if found is None else replace(found, path=self.folder / found.path.name)

    def load(self, found: Found) -> Progress:
        """Continue from a checkpoint of any layout.

        Raises:
            TitanPlanError: C618 for another model, C619 for another optimizer, R754 where it cannot be read.
        """
        record = found.record
        check_fits(record, found.path, self._config)
        parts, states = self._state.restore(record.optimizer_steps)
        with torch.no_grad():
            read_parts(parts, found.path, self._ranks)
        self._engine.optimizer.load(states)
        publish(self._engine.trainables)
        scale = self._engine.loss_scale
        if scale.dynamic and record.loss_scale is not None:
            scale.scale, scale.clean_steps = float(record.loss_scale), record.clean_steps
        self._ranks.collect(lambda: self._load_rng(found), lambda _: [None] * self._ranks.size)
        self._run, self._saved = record.run, record.step
        return Progress(
            step=record.step,
            position=record.position,
            seed=record.seed,
            seq_len=record.seq_len,
            dataset_digest=record.dataset_digest,
            layout=record.layout,
        )

    def save(self, step: int, position: int, *, wait: bool = False, dataset_digest: str = "") -> None:
        """Begin a checkpoint; the one before it is waited for. A step that is saved already is not saved again.

        Args:
            wait: return when it is on the disk; every failure is then an error here.

        Raises:
            TitanPlanError: why the save before this one failed, or with `wait` this one (R752, R755, R756, R76x).
        """
        self._settle(final=False)
        if step == self._saved:
            return
        self._in_flight = step
        # Whatever ends the thread before it says that all is well is a failure.
        self._error = TitanPlanError("R755", f"writing the checkpoint of step {step} broke off", exit_code=_FAILED)
        parts, updates = self._state.staged()
        record = self._record(step, position, dataset_digest)
        rng = {"cpu": torch.get_rng_state(), "device": self._device.rng_state()}
        self._thread = threading.Thread(
            target=self._write, args=(parts, record, updates, rng), name="checkpoint", daemon=True
        )
        self._thread.start()
        if wait or not self._options.asynchronous:
            self._settle(final=wait)

    def finish(self) -> None:
        """Wait for what is in flight.

        Raises:
            TitanPlanError: why the newest save failed.
        """
        self._settle(final=True)
        if self._failed is not None:
            raise self._failed

    def _record(self, step: int, position: int, dataset_digest: str) -> Record:
        config, scale = self._config, self._engine.loss_scale
        return Record(
            version=metadata.version("titan-plan"),
            run=self._run,
            serial=0,
            step=step,
            position=position,
            seed=config.training.seed,
            seq_len=config.workload.seq_len,
            dataset_digest=dataset_digest,
            optimizer=config.workload.optimizer,
            optimizer_steps=0,
            loss_scale=scale.scale if config.workload.precision == "fp16" else None,
            clean_steps=scale.clean_steps,
            layout=config.layout.name,
            device=self._device.kind,
            world_size=config.world_size,
            parameters=config.model.total_params,
            model=asdict(config.model),
            files={},
        )

    def _write(self, parts: list[Part], record: Record, updates: int, rng: dict[str, torch.Tensor]) -> None:
        """Runs in a thread. It touches no device, and no process group but its own."""
        partial: Path | None = None
        try:
            partial = self._ranks.first(lambda: partial_of(self.folder, record.step))
            steps = self._ranks.collect(
                lambda: _write_rng(partial, self._ranks.rank, rng, updates),
                lambda all_updates: [max(all_updates)] * self._ranks.size,
            )
            write_parts(parts, partial, self._ranks)
            self._ranks.first(lambda: self._publish(partial, replace(record, optimizer_steps=steps)))
        except BaseException as error:  # noqa: BLE001 - told when the main thread asks
            self._error = self._complaint(error)
            if self._error is not error:
                self._error.__cause__ = error
            if partial is not None and self._ranks.leads:
                discard(partial)
            return
        self._error = None
        if self._ranks.leads:
            try:
                trim(self.folder, self._options.keep, self._run)
            except (OSError, TitanPlanError) as error:
                _LOG.warning("an old checkpoint in %s could not be removed: %s", self.folder, error)

    def _publish(self, partial: Path, record: Record) -> None:
        ranks = range(self._ranks.size)
        files = sizes_of(partial, [*(_rng_file(rank) for rank in ranks), *(file_of(rank) for rank in ranks)])
        before = whole_checkpoints(self.folder)
        serial = before[0].record.serial + 1 if before else 1
        put_in_place(partial, replace(record, files=files, serial=serial))

    def _settle(self, *, final: bool) -> None:
        """Wait for the save in flight, and decide about its failure."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self._failed, self._error = self._error, None
        if self._failed is None:
            self._saved = self._in_flight
            return
        if final or self._failed.code != _DISK_FULL:
            raise self._failed
        if self._ranks.leads:
            _LOG.error("error[%s]: %s; training goes on. hint: %s", _DISK_FULL, self._failed.message, self._failed.hint)

    def _complaint(self, error: BaseException) -> TitanPlanError:
        full = disk_full(error, self.folder)
        if full is not None:
            return full
        if isinstance(error, TitanPlanError):
            return error
        if is_connection_error(error):
            return connection_error(error, os.environ)
        message = f"a checkpoint could not be written to {self.folder}: {shorten_text(str(error))}"
        hint = "the checkpoint before it is whole; see that the folder can be written by every node"
        return TitanPlanError("R755", message, hint, exit_code=_FAILED)

    def _load_rng(self, found: Found) -> None:
        """Generators go on only where every rank of now was a rank then."""
        record = found.record
        if record.world_size != self._ranks.size:
            return
        try:
            states = torch.load(found.path / _rng_file(self._ranks.rank), weights_only=True)
            torch.set_rng_state(states["cpu"])
            if record.device == self._device.kind:
                self._device.set_rng_state(states["device"])
        except Exception as error:  # a torn file raises anything
            raise unreadable(found.path, f"{_rng_file(self._ranks.rank)}: {shorten_text(str(error))}") from error


def _rng_file(rank: int) -> str:
    return f"rng/rank-{rank}.pt"


def _write_rng(partial: Path, rank: int, states: dict[str, torch.Tensor], updates: int) -> int:
    path = partial / _rng_file(rank)
    with suppress(FileExistsError):
        path.parent.mkdir()
    with path.open("wb") as file:
        torch.save(states, file)
        file.flush()
        os.fsync(file.fileno())
    return updates
