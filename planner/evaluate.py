"""Predicts given layouts: a run table in, the same table with predictions behind it out (`titan-plan evaluate`).

The rules are the general ones: published runs used other programs than our trainer. Rows that share model, workload,
cluster and stack are predicted in one call over columns.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cost_models.calibration import calibration_of
from cost_models.errors import TitanPlanError
from cost_models.layout import Layouts
from cost_models.memory import CATEGORIES
from cost_models.prediction import model_flops, peak_flops_per_device, predict, usable_bytes
from cost_models.rules import GENERAL_RULES, first_violations
from cost_models.setting import Setting
from cost_models.whole_files import write_whole

from .run_table import Refusal, Run, RunTable, read_run_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cost_models.calibration import Calibration
    from cost_models.layout import Column
    from cost_models.memory import MemoryEstimate

OUTPUT_COLUMNS = (
    "predicted_step_time_s",
    "predicted_step_time_low_s",
    "predicted_step_time_high_s",
    "predicted_tokens_per_s_per_device",
    "predicted_mfu",
    "predicted_peak_gib",
    "fits",
    "predicted_status",
    "reason",
)
STATUSES = ("ok", "oom", "invalid", "incomplete")
ALLOCATED = tuple(name for name in CATEGORIES if name not in {"communication", "reserve"})
_GIB = 2**30
_SIZES = ("seq", "global_batch", "n_devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is predicted of one run; the numbers are None where it is invalid or incomplete.

    Attributes:
        peak_gib: one of the next two, as the row's memory_quantity asks.
        allocated_gib, device_gib: peak of torch's allocator (its max allocated), and of the whole device.
        last_rank_gib: the allocator's peak on the last pipeline rank, which some programs log.
        fits: the whole device's peak is within its memory.
        status: `ok`, `oom` (predicted, but it does not fit), `invalid` (breaks a rule), `incomplete`.
        cause: why not, in few words, the same for all rows with the same fault.
        reason: why not, with the row's values; for `ok` what is only approximated.
    """

    step_time_s: float | None = None
    step_time_low_s: float | None = None
    step_time_high_s: float | None = None
    tokens_per_s_per_device: float | None = None
    mfu: float | None = None
    peak_gib: float | None = None
    allocated_gib: float | None = None
    device_gib: float | None = None
    last_rank_gib: float | None = None
    fits: bool | None = None
    status: str
    cause: str = ""
    reason: str = ""

    def cells(self) -> tuple[str, ...]:
        """The output columns as text, numbers with nine digits."""
        numbers = (
            self.step_time_s,
            self.step_time_low_s,
            self.step_time_high_s,
            self.tokens_per_s_per_device,
            self.mfu,
            self.peak_gib,
        )
        fits = "" if self.fits is None else str(self.fits).lower()
        return (*("" if x is None else f"{x:.9g}" for x in numbers), fits, self.status, self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedTable:
    """A run table and, row by row, its predictions."""

    table: RunTable
    evaluations: tuple[Evaluation, ...]

    def counts(self) -> dict[str, int]:
        """Rows by status, all statuses named."""
        found = Counter(evaluation.status for evaluation in self.evaluations)
        return {status: found[status] for status in STATUSES}

    def comparable(self) -> EvaluatedTable:
        """The same, rows with the sizes that they were read to: what turns measured tokens a second into a step time.

        The step time of a plans.csv, which is a prediction, is blanked.
        """
        predicted = ("step_time_s",) if "step_time_s" not in self.table.measured else ()
        rows = (
            (*row, *_sizes(run), *("" for _ in predicted))
            for row, run in zip(self.table.rows, self.table.runs, strict=True)
        )
        header = (*self.table.header, *_SIZES, *predicted)
        return replace(self, table=replace(self.table, header=header, rows=tuple(rows)))

    def to_csv(self) -> str:
        """The input's columns and texts as they stood, then the predictions."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow((*self.table.header, *OUTPUT_COLUMNS))
        for row, evaluation in zip(self.table.rows, self.evaluations, strict=True):
            writer.writerow((*row, *evaluation.cells()))
        return text.getvalue()


def evaluate_runs(
    source: Path | str, *, calibration: Calibration | None = None, defaults: Mapping[str, str] | None = None
) -> EvaluatedTable:
    """Predict the runs of a file (Path) or of its text (str).

    Args:
        calibration: constants for every row; without it, those shipped for each row's device.
        defaults: what empty cells are taken for, by column; see read_run_table.
    """
    table = read_run_table(source, defaults)
    _refuse_own_columns(table.header)
    found: list[Evaluation] = [Evaluation(status="incomplete")] * len(table.runs)
    groups: dict[Setting, list[int]] = defaultdict(list)
    for index, run in enumerate(table.runs):
        try:
            if isinstance(run, Refusal):
                found[index] = _refused(run)
            else:
                groups[_setting(run, calibration)].append(index)
        except TitanPlanError as error:
            found[index] = _failed(error)
    shared: dict[Setting, list[int]] = defaultdict(list)
    for setting, indices in groups.items():
        for index, broken in zip(indices, _violations(setting, _runs(table, indices)), strict=True):
            if broken:
                found[index] = broken
            else:
                shared[_without_batch(setting)].append(index)
    for setting, indices in shared.items():
        for index, evaluation in zip(indices, _predicted_or_failed(setting, _runs(table, indices)), strict=True):
            found[index] = evaluation
    return EvaluatedTable(table=table, evaluations=tuple(found))


def _sizes(run: Run | Refusal) -> tuple[str, ...]:
    if isinstance(run, Refusal):
        return ("",) * len(_SIZES)
    return str(run.workload.seq_len), str(run.workload.global_batch), str(run.n_devices)


def write_evaluation(evaluated: EvaluatedTable, out: Path, source: Path) -> None:
    """Write the evaluated table, whole or not at all; the input itself is never overwritten."""
    try:
        if out.exists() and source.exists() and out.samefile(source):
            raise TitanPlanError("C603", f"{out} is the input itself", "write to another file")
        if out.is_symlink() or (out.exists() and not out.is_file()):
            raise TitanPlanError("C603", f"{out} is no plain file", "name the file to write")
        write_whole({out: evaluated.to_csv()})
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise TitanPlanError("C603", f"cannot write {out}: {what}", "name a file in a folder that exists") from error


def _refuse_own_columns(header: tuple[str, ...]) -> None:
    own = [name for name in header if name.strip().lower() in OUTPUT_COLUMNS]
    if own:
        raise TitanPlanError(
            "C606", f"the run table has a column {own[0]!r}, which evaluate writes", "rename or remove it"
        )


def _runs(table: RunTable, indices: Iterable[int]) -> list[Run]:
    """The rows at these indices, all of which were read to a Run."""
    return [run for run in (table.runs[index] for index in indices) if isinstance(run, Run)]


def _setting(run: Run, calibration: Calibration | None) -> Setting:
    setting = Setting(
        model=run.model,
        workload=run.workload,
        cluster=run.cluster,
        stack=run.stack,
        calibration=calibration or calibration_of(run.cluster.device.name),
        n_devices=run.n_devices,
    )
    peak_flops_per_device(setting)  # refuses a precision that the device does not have
    return setting


def _without_batch(setting: Setting) -> Setting:
    """The setting for memory and step time alone, neither of which reads the global batch: the layout has it all."""
    return replace(setting, workload=replace(setting.workload, global_batch=1))


def _refused(refusal: Refusal) -> Evaluation:
    return Evaluation(status=refusal.status, cause=refusal.cause, reason=refusal.reason)


def _failed(error: TitanPlanError) -> Evaluation:
    reason = f"{error.code}: {error.message}" + (f"; {error.hint}" if error.hint else "")
    return Evaluation(status="invalid" if error.code[0] in "TDSB" else "incomplete", cause=error.code, reason=reason)


def _violations(setting: Setting, runs: list[Run]) -> list[Evaluation | None]:
    """For each run the first rule that it breaks, None where it keeps all."""
    broken = first_violations(setting, Layouts.of([run.layout for run in runs]), GENERAL_RULES)
    found: list[Evaluation | None] = []
    for run, index in zip(runs, broken.tolist(), strict=True):
        rule = GENERAL_RULES[index]
        reason = f"{rule.code}: {rule.reason(setting, run.layout)}" if index >= 0 else ""
        cause = f"{rule.code} {rule.title}"
        found.append(Evaluation(status="invalid", cause=cause, reason=reason) if index >= 0 else None)
    return found


def _predicted_or_failed(setting: Setting, runs: list[Run]) -> list[Evaluation]:
    """Predictions; what the cost model refuses (a link that the cluster lacks) is the reason of all runs alike."""
    try:
        return _predicted(setting, runs)
    except TitanPlanError as error:
        return [_failed(error)] * len(runs)


def _predicted(setting: Setting, runs: list[Run]) -> list[Evaluation]:
    """Predictions of valid runs that differ in layout and global batch only."""
    layouts = Layouts.of([run.layout for run in runs])
    with np.errstate(all="ignore"):
        prediction = predict(setting, layouts)
        columns = (
            prediction.step_time_s,
            prediction.step_time_high_s / prediction.step_time_s,
            prediction.memory.allocated_bytes / _GIB,
            prediction.memory.peak_bytes / _GIB,
            _last_rank_bytes(prediction.memory, layouts) / _GIB,
        )
    return [
        _evaluation(replace(setting, workload=run.workload), run, *map(float, numbers))
        for run, *numbers in zip(runs, *columns, strict=True)
    ]


def _last_rank_bytes(memory: MemoryEstimate, layouts: Layouts) -> Column:
    """What the allocator holds on the last pipeline rank; one rank is its own last."""
    sums = [sum(stage[name] for name in ALLOCATED) for stage in memory.stages]
    return np.broadcast_to(np.where(layouts.pp > 1, sums[-1], sums[0]), layouts.shape)


def _evaluation(
    setting: Setting, run: Run, step_s: float, spread: float, allocated: float, device: float, last: float
) -> Evaluation:
    if not all(map(math.isfinite, (step_s, spread, allocated, device, last))) or step_s <= 0:
        reason = "the prediction is not a finite number; check the sizes and degrees of the row"
        return Evaluation(status="incomplete", cause="prediction is not finite", reason=reason)
    seconds, usable_gib = step_s * run.n_devices, usable_bytes(setting) / _GIB
    fits = device <= usable_gib
    too_much = f"M101: {device:.1f} GiB on the worst device, it has {usable_gib:.1f} GiB"
    return Evaluation(
        step_time_s=step_s,
        step_time_low_s=step_s / spread,
        step_time_high_s=step_s * spread,
        tokens_per_s_per_device=run.workload.tokens / seconds,
        mfu=model_flops(setting) / (seconds * peak_flops_per_device(setting)),
        peak_gib=device if run.memory_quantity == "device" else allocated,
        allocated_gib=allocated,
        device_gib=device,
        last_rank_gib=last,
        fits=fits,
        status="ok" if fits else "oom",
        cause="" if fits else "M101 does not fit the device",
        reason="; ".join((*(() if fits else (too_much,)), *run.notes)),
    )
