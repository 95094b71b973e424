"""TrainConfig and its parts: one training run as frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cost_models.layout import Layout
    from cost_models.model import ModelSpec
    from cost_models.workload import Workload

Overrides = Mapping[str, object] | Sequence[str]
"""`{"training.lr": "1e-4"}` or `["training.lr=1e-4"]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """Where tokens come from.

    Attributes:
        name: `demo` is built in and deterministic; else a file or folder, or a data set of the Hugging Face Hub.
        path: file or folder of the data; where it is given, the name is only a label.
        tokenizer: file or folder of the tokenizer; empty or `bytes` for the built-in one.
        text_key: key of a JSON line, or column of a table, that holds the text.
    """

    name: str = "demo"
    path: str = ""
    tokenizer: str = ""
    text_key: str = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """When checkpoints are written.

    Attributes:
        interval: steps between two checkpoints; 0 for none.
        keep: newest checkpoints that stay on disk.
        resume: continue from the newest checkpoint in the folder.
        asynchronous: written beside training, from a copy in host memory.
        path: folder of the checkpoints, on a disk that all nodes share; empty for `checkpoints` in the output folder.
        load: weights in Hugging Face's form to start from where there is no checkpoint; empty for none.
    """

    interval: int = 500
    keep: int = 2
    resume: bool = True
    asynchronous: bool = True
    path: str = ""
    load: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What a run is besides its shape: the batch is in the layout and the workload.

    Attributes:
        max_steps, epochs: the run ends at the one that comes first; None for no such end. A file that gives neither
            runs 1000 steps.
    """

    lr: float = 3e-4
    warmup_steps: int = 0
    max_steps: int | None = 1000
    epochs: int | None = None
    seed: int = 0
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    output_dir: str = "output"
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationOptions:
    """How gradients and groups communicate.

    Attributes:
        fuse_gradient: gradients of a layer travel as one message.
        async_allreduce: gradients travel while backward goes on.
        comm_algorithm: `auto`, or the algorithm that HCCL_ALGO forces between nodes.
    """

    fuse_gradient: bool = True
    async_allreduce: bool = True
    comm_algorithm: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsOptions:
    """What keeps numbers in range, and how they are compiled.

    Attributes:
        gradient_clip: largest norm of all gradients; 0 for no clipping.
        loss_scale: fixed scale of the loss in fp16; None lets it follow the overflows.
        compile: torch.compile each layer.
    """

    gradient_clip: float = 1.0
    loss_scale: float | None = None
    compile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """What the planner predicted for this file; the trainer does not act on it.

    Attributes:
        version: titan-plan that predicted.
        layout: name of the layout predicted for; an edited file has another one.
        step_time_low_s, step_time_high_s: 80 % interval.
        p_fits: probability that the peak stays below the device's memory.
        worst_stage: pipeline rank with the peak.
        memory_bytes: parts of the peak, by category.
        time_s: parts of the step; communication_s, computing_s: what is in two of them.
        inputs: what the search was asked, as text.
    """

    version: str
    layout: str
    step_time_s: float
    peak_bytes: int
    step_time_low_s: float = 0.0
    step_time_high_s: float = 0.0
    tokens_per_s_per_device: float = 0.0
    mfu: float = 0.0
    hfu: float = 0.0
    headroom_bytes: int = 0
    host_bytes_per_node: int = 0
    p_fits: float = 0.0
    worst_stage: int = 0
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    time_s: Mapping[str, float] = field(default_factory=dict)
    communication_s: Mapping[str, float] = field(default_factory=dict)
    computing_s: Mapping[str, float] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A config.yaml that was checked.

    Attributes:
        cluster: name or path of the cluster; empty where the file names none.
        plan: what was predicted for the file as it was written; None for a file by hand.
        overrides: what the file changes about its catalogue model, one line each, for the log.
        origin: the file, as complaints name it.
    """

    model: ModelSpec
    workload: Workload
    layout: Layout
    training: TrainingOptions = field(default_factory=TrainingOptions)
    communication: CommunicationOptions = field(default_factory=CommunicationOptions)
    numerics: NumericsOptions = field(default_factory=NumericsOptions)
    cluster: str = ""
    plan: PlanSummary | None = None
    overrides: tuple[str, ...] = ()
    origin: str = field(default="config.yaml", compare=False)

    @property
    def world_size(self) -> int:
        """Devices that the run takes."""
        return self.layout.devices
