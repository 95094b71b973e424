"""The first lines of a run: what trains, on what, on which data, and what the file changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    return "\n".join(lines + [f"changed {line}" for line in config.overrides])
