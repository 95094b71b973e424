"""The first lines of a run: what trains, on what, on which data, and what the file changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import Progress
    from .config_values import TrainConfig


def run_summary(config: TrainConfig, kind: str, data: str, total_steps: int) -> str:
    """A few lines of text.

    Args:
        kind: npu, cuda or cpu.
        data: what the data set says of itself.
    """
    model, layout, workload = config.model, config.layout, config.workload
    lines = [
        f"model   {model.name}, {model.total_params:,} parameters",
        f"layout  {layout.name} on {layout.devices} {kind} device{'s' if layout.devices > 1 else ''}",
        f"batch   {workload.global_batch} sequences of {workload.seq_len} tokens = micro batch {layout.micro_batch} x "
        f"accumulation {layout.accumulation} x dp {layout.dp}",
        f"numbers {workload.precision}, {workload.optimizer}, lr {config.training.lr:g}, {total_steps} steps",
        f"data    {data}",
        f"output  {config.training.output_dir}",
    ]
    if config.numerics.loss_scale is not None and workload.precision != "fp16":
        lines.append(f"note    loss_scale {config.numerics.loss_scale:g} is for fp16; {workload.precision} needs none")
    if not config.training.checkpoint.interval:
        lines.append("note    checkpoint.interval is 0: nothing is saved")
    return "\n".join(lines + [f"changed {line}" for line in config.overrides])


def changed_since(progress: Progress, config: TrainConfig, digest: str) -> list[str]:
    """What of the data is not as it was when the checkpoint was written: the run then sees other sequences than before.

    Args:
        digest: of the data set's tokens now.
    """
    pairs = {
        "training.seed": (progress.seed, config.training.seed),
        "training.seq_len": (progress.seq_len, config.workload.seq_len),
        "the data's digest": (progress.dataset_digest, digest),
    }
    lines = [f"note: {name} was {old!r} and is {new!r}" for name, (old, new) in pairs.items() if old and old != new]
    if progress.layout != config.layout.name:
        lines.append(f"layout was {progress.layout}, the checkpoint is cut anew for {config.layout.name}")
    return lines
