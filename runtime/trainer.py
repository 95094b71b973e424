"""The run: open everything, take steps, tell about them, keep checkpoints, end well."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cost_models.errors import TitanPlanError

from .assembly import Assembly, assemble
from .checkpoint import Checkpoints
from .checkpoint_files import checkpoint_folder
from .compiling import not_compiled
from .data import DataLoader, epochs_to_steps, open_tokens
from .device import open_device
from .engine import Engine
from .faults import StopRequest, connection_error, disk_full, is_connection_error, non_finite_loss, out_of_memory
from .garbage import settled
from .hf_weights import load_hf
from .metrics import StepMeter
from .metrics_files import MetricsWriter
from .run_summary import changed_since, run_summary
from .step_line import step_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .config_values import TrainConfig
    from .data import TokenSequences
    from .device import TrainDevice
    from .engine import StepResult
    from .processes import Process

_LOG: Final = logging.getLogger("titan_plan")
STOPPED: Final = 130
"""Exit code of a run that was asked to stop, saved, and can go on."""


def train(config: TrainConfig, process: Process, kind: str) -> None:
    """Train as the config says; ends with SystemExit 130 where a signal asked for it.

    Raises:
        TitanPlanError: whatever ends the run early, told as what to look at.
    """
    _configure_logging(process)
    device = open_device(kind, process.local_rank)
    tokens = open_tokens(
        config.training.dataset,
        seq_len=config.workload.seq_len,
        vocab_size=config.model.vocab_size,
        seed=config.training.seed,
        cache_dir=Path(config.training.output_dir) / "tokens",
    )
    process.join(device)
    try:
        _Run(config, process, device, tokens).go()
    except TitanPlanError:
        raise
    except Exception as error:
        explained = _explained(error, config, process.environ)
        if explained is None:
            raise
        raise explained from error
    finally:
        process.leave()


def _explained(error: Exception, config: TrainConfig, environ: Mapping[str, str]) -> TitanPlanError | None:
    """What a user can do about an error of the machine; None for a mistake of ours."""
    found = out_of_memory(error, config) or disk_full(error) or not_compiled(error, config)
    if found is None and is_connection_error(error):
        found = connection_error(error, environ)
    return found


class _Run:
    """One life of a run, from a checkpoint or from the beginning."""

    def __init__(self, config: TrainConfig, process: Process, device: TrainDevice, tokens: TokenSequences) -> None:
        self._config, self._process, self._device, self._tokens = config, process, device, tokens
        self._leads = process.rank == 0
        self._assembly: Assembly = assemble(config, device)
        self._engine = Engine(config, self._assembly, device)
        self._checkpoints = Checkpoints(
            checkpoint_folder(config), config.training.checkpoint, config, self._engine, self._assembly, device
        )
        self._meter = StepMeter(config)
        self._total = _total_steps(config, tokens.n_sequences)
        self._step = self._position = 0

    def go(self) -> None:
        """Train to the end, or until a signal."""
        resumed = self._restore()
        if self._leads:
            _tell(run_summary(self._config, self._device.kind, self._tokens.description, self._total))
            if resumed is not None:
                _tell(f"resumed at step {self._step}")
        writer = (
            MetricsWriter(self._config.training.output_dir, resume_step=resumed, tell=_tell) if self._leads else None
        )
        try:
            with StopRequest() as stop, self._loader() as loader, settled():
                stopped = self._steps(loader, stop, writer)
        except TitanPlanError:
            self._finish_quietly()
            raise
        finally:
            if writer is not None:
                writer.close()
        self._checkpoints.finish()
        if stopped:
            self._leave_early()
        self._tell_all([self._end(resumed)])

    def _end(self, resumed: int | None) -> str:
        if resumed is not None and resumed >= self._total:
            more = "raise training.max_steps or epochs, or choose another output_dir for a new run"
            return f"nothing left to do: step {self._step} of {self._total} was reached before; {more}"
        kept = f", checkpoints in {self._checkpoints.folder}" if self._config.training.checkpoint.interval else ""
        return f"done: {self._step} steps; metrics in {self._config.training.output_dir}/metrics.csv{kept}"

    def _finish_quietly(self) -> None:
        """A save under way is worth keeping when the run ends for a bad loss; its own trouble is not the news."""
        with suppress(Exception):
            self._checkpoints.finish()

    def _loader(self) -> DataLoader:
        layout = self._config.layout
        groups = self._assembly.groups
        return DataLoader(
            self._tokens,
            global_batch=self._config.workload.global_batch,
            micro_batch=layout.micro_batch,
            accumulation=layout.accumulation,
            dp_rank=groups.at.dp if groups else 0,
            dp=layout.dp,
        )

    def _restore(self) -> int | None:
        """Continue from the newest checkpoint, or from given weights, or from the seed; the step continued from."""
        options = self._config.training.checkpoint
        found = self._checkpoints.newest() if options.resume else None
        if found is not None:
            progress = self._checkpoints.load(found)
            self._step, self._position = progress.step, progress.position
            self._tell_all(changed_since(progress, self._config, self._tokens.digest))
            return self._step
        if options.load:
            folder = load_hf(options.load, self._config, self._engine.trainables)
            self._tell_all((f"weights from {options.load}", *folder.notes))
        return None

    def _tell_all(self, lines: Iterable[str]) -> None:
        for line in lines if self._leads else ():
            _tell(line)

    def _steps(self, loader: DataLoader, stop: StopRequest, writer: MetricsWriter | None) -> bool:
        """Take steps; True if a signal ended them."""
        interval = self._config.training.checkpoint.interval
        saved = self._step
        while self._step < self._total:
            began = time.perf_counter()
            lr = learning_rate(self._config, self._step + 1)
            result = self._engine.step(loader.batch(self._position), lr, stop=stop.requested)
            self._refuse_bad(result)
            self._step += 1
            self._position += self._config.workload.global_batch
            self._note(result, lr, time.perf_counter() - began, writer)
            ends = result.stop or self._step == self._total
            if interval and (ends or self._step % interval == 0) and saved != self._step:
                self._checkpoints.save(self._step, self._position, wait=ends, dataset_digest=self._tokens.digest)
                saved = self._step
            if result.stop and self._step < self._total:
                return True
        return False

    def _refuse_bad(self, result: StepResult) -> None:
        """A loss that is no number ends the run before it touches the weights; the rank that has it tells."""
        if result.bad_rank is None:
            return
        scale = self._engine.loss_scale
        fp16 = self._config.workload.precision == "fp16"
        raise non_finite_loss(
            self._step + 1, result.bad_rank, self._config.workload.precision, scale.scale if fp16 else None
        )

    def _note(self, result: StepResult, lr: float, seconds: float, writer: MetricsWriter | None) -> None:
        if writer is None:
            return
        record = self._meter.make_record(
            step=self._step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=lr,
            step_time_s=seconds,
            memory_bytes=self._device.peak_memory(),
            skipped=result.skipped,
            loss_scale=self._engine.loss_scale.scale if self._config.workload.precision == "fp16" else None,
            balance_loss=result.balance,
        )
        writer.write(record)
        _tell(step_line(record, self._meter.plan, self._total))

    def _leave_early(self) -> None:
        if self._leads:
            kept = "" if self._config.training.checkpoint.interval else ", without a checkpoint (checkpoint.interval 0)"
            _tell(f"stopped at step {self._step} as asked{kept}; the same command goes on from there")
        sys.exit(STOPPED)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rises linearly over the warm-up and stays; the first step is 1."""
    warmup = config.training.warmup_steps
    return config.training.lr * min(1.0, step / warmup) if warmup else config.training.lr


def _total_steps(config: TrainConfig, n_sequences: int) -> int:
    """The end that comes first."""
    ends = [config.training.max_steps] if config.training.max_steps is not None else []
    if config.training.epochs is not None:
        ends.append(epochs_to_steps(config.training.epochs, n_sequences, config.workload.global_batch))
    return min(ends)


def _configure_logging(process: Process) -> None:
    """Log lines of rank 0 alone; of others only what is wrong."""
    level = logging.INFO if process.rank == 0 else logging.WARNING
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    for name in ("titan_plan", "runtime"):
        logging.getLogger(name).setLevel(level)


def _tell(text: str) -> None:
    _LOG.info("%s", text)
