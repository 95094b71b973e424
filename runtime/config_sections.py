"""The sections of config.yaml as pydantic models: their keys, kinds, bounds and defaults.

`model` is not here: it has the keys of a model file and is read like one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from cost_models.errors import TitanPlanError
from cost_models.layout import CP_KINDS, PLACEMENTS, RECOMPUTES, REDUCTIONS
from cost_models.model_files import flag, real_number, show, text, whole_number
from cost_models.schedules import SCHEDULES
from cost_models.workload import OPTIMIZER_STATE_BYTES, PRECISIONS
from cost_models.yaml_numbers import nearest_hint

_MOST_DEVICES: Final = 2**20
_MOST_SEQUENCES: Final = 2**31
_MOST_STEPS: Final = 10**12


def _reader(read: Callable[[object, str], object], needed: str) -> BeforeValidator:
    """A reader of values in a model file as a validator of pydantic."""

    def convert(value: object) -> object:
        try:
            return read(value, "")
        except TitanPlanError:
            raise PydanticCustomError("C606", needed) from None

    return BeforeValidator(convert)


def _one_of(options: tuple[str, ...]) -> BeforeValidator:
    """A name of a list, in any case of letters."""

    def choose(value: object) -> str:
        if not isinstance(value, str) or value.strip().lower() not in options:
            hint = f"one of {', '.join(options)} is needed"
            raise PydanticCustomError("C611", hint)
        return value.strip().lower()

    return BeforeValidator(choose)


def _recompute(value: object) -> tuple[str, int]:
    """What gradient_checkpointing says: (recompute, recompute_layers) of a Layout."""
    if isinstance(value, bool):
        return ("full" if value else "none", 0)
    if isinstance(value, str) and value.strip().lower() in RECOMPUTES:
        return (value.strip().lower(), 0)
    try:
        layers = whole_number(value.removeprefix("layers=") if isinstance(value, str) else value, "")
    except TitanPlanError:
        layers = 0
    if not 0 < layers <= _MOST_STEPS:
        raise PydanticCustomError("C611", "false, true, selective, full, or a number of layers of each stage is needed")
    return ("full", layers)


def _loss_scale(value: object) -> float | None:
    if isinstance(value, str) and value.strip().lower() == "dynamic":
        return None
    try:
        return real_number(value, "")
    except TitanPlanError:
        raise PydanticCustomError("C606", "a number, or dynamic, is needed") from None


_WHOLE: Final = _reader(whole_number, "a whole number is needed")
_REAL: Final = _reader(real_number, "a number is needed")
Degree = Annotated[int, _WHOLE, Field(ge=1, le=_MOST_DEVICES)]
Sequences = Annotated[int, _WHOLE, Field(ge=1, le=_MOST_SEQUENCES)]
Count = Annotated[int, _WHOLE, Field(ge=0, le=_MOST_STEPS)]
Steps = Annotated[int, _WHOLE, Field(ge=1, le=_MOST_STEPS)]
Whole = Annotated[int, _WHOLE]
Real = Annotated[float, _REAL]
NotNegative = Annotated[float, _REAL, Field(ge=0)]
Flag = Annotated[bool, _reader(flag, "true or false is needed")]
Text = Annotated[str, _reader(text, "text is needed")]


class _Section(BaseModel):
    """Keys without a value count as not given."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    short: ClassVar[str] = ""
    """The key that a plain value in place of the section fills, as in `cluster: atlas-800t-a2`."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: object) -> object:
        if isinstance(values, Mapping):
            return {str(key): value for key, value in values.items() if value is not None}
        return {cls.short: values} if cls.short and isinstance(values, str) else values


class DatasetSection(_Section):
    """`dataset: demo` or its keys."""

    short: ClassVar[str] = "name"
    name: Text = "demo"
    path: Text = ""
    tokenizer: Text = ""
    text_key: Text = "text"


class CheckpointSection(_Section):
    """When checkpoints are written."""

    interval: Count = 500
    keep: Steps = 2
    resume: Flag = True
    asynchronous: Flag = True
    path: Text = ""
    load: Text = ""


class TrainingSection(_Section):
    """Batch, length and rates; what is None here is derived from the others."""

    batch_size: Sequences | None = None
    micro_batch_size: Sequences | None = None
    gradient_accumulation_steps: Sequences | None = None
    seq_len: Sequences | None = None
    lr: Annotated[float, _REAL, Field(gt=0)] = 3e-4
    warmup_steps: Count = 0
    max_steps: Steps | None = None
    epochs: Steps | None = None
    optimizer: Annotated[str, _one_of(tuple(OPTIMIZER_STATE_BYTES))] = "adamw"
    seed: Annotated[int, _WHOLE, Field(ge=0, lt=2**63)] = 0
    dataset: DatasetSection = DatasetSection()
    output_dir: Text = "output"
    checkpoint: CheckpointSection = CheckpointSection()
    # Of runs of other programs that the planner predicts; ours trains without dropout, under the causal mask.
    dropout: Flag = False
    causal: Flag = True


class DistributedSection(_Section):
    """Degrees and how they are used; what is None here follows from the others."""

    tp_size: Degree = 1
    sequence_parallel: Flag | None = None
    cp_size: Degree = 1
    cp_kind: Annotated[str, _one_of(CP_KINDS)] | None = None
    ep_size: Degree = 1
    pp_size: Degree = 1
    virtual_pp_size: Degree = 1
    pp_schedule: Annotated[str, _one_of(SCHEDULES)] | None = None
    stage_layers: tuple[Steps, ...] | None = None
    dp_size: Degree | None = None
    dp_shard_size: Degree | None = None
    reduce_gradients: Annotated[str, _one_of(REDUCTIONS)] = "last"
    placement: Annotated[str, _one_of(PLACEMENTS)] = PLACEMENTS[0]
    fuse_gradient: Flag = True
    async_allreduce: Flag = True
    comm_algorithm: Text = "auto"


class OptimizationSection(_Section):
    """Precision, and what saves memory."""

    precision: Annotated[str, _one_of(tuple(PRECISIONS))] = "bf16"
    gradient_checkpointing: Annotated[tuple[str, int], BeforeValidator(_recompute)] = ("none", 0)
    zero_stage: Annotated[int, _WHOLE, Field(ge=0, le=3)] = 0
    swap_optimizer: Flag = False
    activation_cpu_offload: Flag = False
    gradient_clip: NotNegative = 1.0
    loss_scale: Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_loss_scale)] = None
    compile: Flag = False
    fused_attention: Flag = True


class ClusterSection(_Section):
    """`cluster: NAME`, or its name with the number of devices that the file is for."""

    short: ClassVar[str] = "name"
    name: Text = ""
    devices: Degree | None = None


class PlanSection(_Section):
    """What was predicted; a newer planner may say more, so unknown keys are left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    version: Text
    layout: Text
    step_time_s: NotNegative
    peak_bytes: Whole
    step_time_low_s: NotNegative = 0.0
    step_time_high_s: NotNegative = 0.0
    tokens_per_s_per_device: NotNegative = 0.0
    mfu: NotNegative = 0.0
    hfu: NotNegative = 0.0
    headroom_bytes: Whole = 0
    host_bytes_per_node: Whole = 0
    p_fits: NotNegative = 0.0
    worst_stage: Whole = 0
    memory_bytes: dict[str, Whole] = {}
    time_s: dict[str, Real] = {}
    communication_s: dict[str, Real] = {}
    computing_s: dict[str, Real] = {}
    inputs: dict[str, Text] = {}


SECTIONS: Final[dict[str, type[_Section]]] = {
    "training": TrainingSection,
    "distributed": DistributedSection,
    "optimization": OptimizationSection,
    "cluster": ClusterSection,
    "plan": PlanSection,
}
_NESTED: Final[dict[str, type[_Section]]] = {
    **SECTIONS,
    "training.dataset": DatasetSection,
    "training.checkpoint": CheckpointSection,
}

_S = TypeVar("_S", bound=_Section)


def read_section(section: type[_S], values: object, name: str, origin: str) -> _S:
    """Check one section; the first mistake is the error."""
    try:
        return section.model_validate({} if values is None else values)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0], name, origin) from None


def _refusal(error: ErrorDetails, section: str, origin: str) -> TitanPlanError:
    """A complaint of pydantic in our words."""
    place, kind = ".".join([section, *map(str, error["loc"])]), error["type"]
    if kind == "extra_forbidden":
        owner, _, key = place.rpartition(".")
        return TitanPlanError("C605", f"{origin}: unknown key {place}", _where(key, owner))
    if kind == "missing":
        return TitanPlanError("C608", f"{origin}: {place} is missing", "every prediction has it; or drop the section")
    got = f"{origin}: {place} is {show(error['input'])}"
    if kind in {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}:
        return TitanPlanError("C610", got, error["msg"].replace("Input should be", "it must be"))
    if kind in {"C606", "C611"}:
        return TitanPlanError(kind, got, error["msg"])
    needed = "a list is needed" if kind == "tuple_type" else "`key: value` lines are needed"
    return TitanPlanError("C606", got, needed)


def _where(key: str, owner: str) -> str:
    """The section that has the key, or the nearest key of this one."""
    homes = [name for name, section in _NESTED.items() if key in section.model_fields and name != "plan"]
    if homes:
        return f"{key} belongs to section {' or '.join(homes)}"
    return nearest_hint(key, _NESTED[owner].model_fields)


def fields_of(section: BaseModel, *left_out: str) -> dict[str, Any]:
    """The values of a section by key."""
    return {key: getattr(section, key) for key in type(section).model_fields if key not in left_out}
