"""What a checkpoint says of itself: titan_plan.json, plain JSON beside the tensors, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    from pathlib import Path

    from .config_values import TrainConfig

FORMAT: Final = 1
RECORD: Final = "titan_plan.json"
_MOST_NAMED: Final = 6
# Neither changes what the model computes: a label, and the length that it was pre-trained with.
_NOT_COMPARED: Final = ("name", "seq_len")
_STATES: Final = {"adamw": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One checkpoint.

    Attributes:
        version: titan-plan that wrote it.
        run: the same for all checkpoints that follow from one another, and for no others.
        serial: counts up with every checkpoint of the folder, also where training went back to an earlier step.
        position: sequences consumed since the beginning.
        dataset_digest: of the data's tokens; empty where unknown.
        optimizer_steps: updates so far, fewer than `step` where fp16 skipped some; 0 means that there is no state.
        loss_scale, clean_steps: of fp16; None and 0 for other precisions.
        layout: name of the layout that wrote it; any layout may read it.
        device: npu, cuda or cpu.
        model: the fields of its ModelSpec.
        files: bytes of every other file, by its path in the folder.
    """

    version: str
    run: str
    serial: int
    step: int
    position: int
    seed: int
    seq_len: int
    dataset_digest: str
    optimizer: str
    optimizer_steps: int
    loss_scale: float | None
    clean_steps: int
    layout: str
    device: str
    world_size: int
    parameters: int
    model: Mapping[str, Any]
    files: Mapping[str, int]


def state_names(optimizer: str) -> tuple[str, ...]:
    """Tensors that an optimizer keeps for each parameter."""
    return _STATES[optimizer]


def record_text(record: Record) -> str:
    """The text of the file."""
    return json.dumps({"format": FORMAT, **asdict(record)}, indent=2, ensure_ascii=False) + "\n"


def read_record(path: Path) -> Record:
    """Read the file of a checkpoint.

    Raises:
        TitanPlanError: C619 for a format that a later titan-plan writes.
        OSError, ValueError: for a file that is not there or is not whole.
    """
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or not isinstance(values.get("format"), int):
        raise ValueError(f"{path.name} is not of a checkpoint")  # noqa: TRY004 - as for every torn file
    if values["format"] > FORMAT:
        message = f"{path.parent} has format {values['format']} of titan-plan {values.get('version', '?')}"
        raise TitanPlanError("C619", message, f"this version reads formats up to {FORMAT}: install that version")
    wanted = [field.name for field in fields(Record)]
    missing = [name for name in wanted if name not in values]
    if missing:
        raise ValueError(f"{path.name} lacks {missing[0]}")
    record = Record(**{name: values[name] for name in wanted})
    _check_kinds(record, path)
    return record


def _check_kinds(record: Record, path: Path) -> None:
    """Numbers are numbers: a file edited by hand fails here, not in the middle of a load."""
    wrong = [
        field.name
        for field in fields(Record)
        if (field.type == "int" and type(getattr(record, field.name)) is not int)
        or (field.type == "str" and not isinstance(getattr(record, field.name), str))
        or (str(field.type).startswith("Mapping") and not isinstance(getattr(record, field.name), dict))
    ]
    if wrong or record.optimizer not in _STATES or not isinstance(record.loss_scale, int | float | None):
        raise ValueError(f"{path.name} has a bad {(wrong or ['optimizer or loss_scale'])[0]}")


def check_fits(record: Record, path: Path, config: TrainConfig) -> None:
    """Refuse a checkpoint of another model, or of an optimizer with other state.

    Raises:
        TitanPlanError: C618 with the dimensions that differ; C619 for the optimizer.
    """
    way_out = "give another training.output_dir, or training.checkpoint.resume: false to start anew"
    different = model_differences(record.model, asdict(config.model))
    if different:
        named = "; ".join(different[:_MOST_NAMED]) + ("; ..." if len(different) > _MOST_NAMED else "")
        message = f"checkpoint {path} is of another model: {named}"
        raise TitanPlanError("C618", message, f"set these model keys as in the checkpoint, {way_out}")
    optimizer = config.workload.optimizer
    if record.optimizer_steps and state_names(record.optimizer) != state_names(optimizer):
        message = f"checkpoint {path} has the state of {record.optimizer}, training.optimizer is {optimizer}"
        raise TitanPlanError("C619", message, f"set training.optimizer: {record.optimizer}, {way_out}")


def model_differences(saved: Mapping[str, Any], here: Mapping[str, Any], before: str = "") -> list[str]:
    """Lines such as `hidden_dim 256 in the checkpoint, 512 here`; keys that one side does not know do not count."""
    found: list[str] = []
    for key in here:
        if key not in saved or (not before and key in _NOT_COMPARED):
            continue
        old, new = saved[key], here[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += model_differences(old, new, f"{before}{key}.")
        elif old != new:
            found.append(f"{before}{key} {_short(old)} in the checkpoint, {_short(new)} here")
    return found


def _short(value: object) -> str:
    if value is None:
        return "none"
    return "given" if isinstance(value, Mapping) else str(value)[:40]
