"""What is told about each step, and the constants of a run that its rates need.

A step's tokens and model FLOPs follow from config.yaml alone; what is measured is loss, norm, time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    from runtime.config_values import PlanSummary, TrainConfig

_GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step as it is told.

    Attributes:
        step: the first step of a run is 1.
        loss: mean over the tokens of the global batch.
        grad_norm: of all gradients, before clipping.
        learning_rate: that this step used.
        mfu: model FLOPs (no recompute, causal attention counted half) / peak, as a share of 1; None without a peak.
        memory_gib: peak of this device since the run began, GiB.
        skipped: gradients overflowed in fp16, and the optimizer left the weights alone.
        loss_scale: of fp16; None elsewhere.
        balance_loss: how evenly experts are loaded, 1 where they share alike; None for a dense model.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_time_s: float
    tokens_per_s_per_device: float
    mfu: float | None
    memory_gib: float
    skipped: bool = False
    loss_scale: float | None = None
    balance_loss: float | None = None


def mfu(model_flops_per_step: float, step_time_s: float, n_devices: int, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation as a share of 1.

    Args:
        model_flops_per_step: over all devices, without recompute, causal attention counted half.
        peak_flops: of one device, FLOP/s; None where it is not known, and then neither is the share.
    """
    if peak_flops is None:
        return None
    return _rate(model_flops_per_step, step_time_s * n_devices * peak_flops)


class StepMeter:
    """What a run does in each step, and from it the rates of a step that was measured.

    Attributes:
        tokens_per_step, model_flops_per_step: over all devices.
        peak_flops: of the config's cluster in the precision that GEMMs run in, FLOP/s; None where no cluster is named
            or none can tell.
        no_peak_because: why a named cluster gives no peak; empty where it does, or where none is named.
        plan: the prediction, if the layout is still the one that it was made for.
    """

    def __init__(self, config: TrainConfig) -> None:
        workload = config.workload
        self.n_devices = config.world_size
        self.tokens_per_step = workload.tokens
        # Backward is twice the forward pass: each GEMM has a gradient for its input and one for its weight.
        forward_flops = config.model.forward_flops_per_sequence(workload.seq_len)
        self.model_flops_per_step = 3.0 * forward_flops * workload.global_batch
        self.peak_flops, self.no_peak_because = _peak_flops(config)
        self.plan: PlanSummary | None = None
        if config.plan is not None and config.plan.layout == config.layout.name:
            self.plan = config.plan

    def make_record(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        step_time_s: float,
        memory_bytes: int,
        skipped: bool = False,
        loss_scale: float | None = None,
        balance_loss: float | None = None,
    ) -> StepRecord:
        """The record of a step: what was measured, as StepRecord tells it, and the rates that follow."""
        return StepRecord(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            step_time_s=step_time_s,
            tokens_per_s_per_device=_rate(self.tokens_per_step, step_time_s * self.n_devices),
            mfu=mfu(self.model_flops_per_step, step_time_s, self.n_devices, self.peak_flops),
            memory_gib=memory_bytes / _GIB,
            skipped=skipped,
            loss_scale=loss_scale,
            balance_loss=balance_loss,
        )


def _rate(amount: float, time: float) -> float:
    """A clock too coarse for the step is no reason to stop a run."""
    return amount / time if time > 0 else float("nan")


def _peak_flops(config: TrainConfig) -> tuple[float | None, str]:
    """The peak of the config's cluster, or why it has none; a rate in the log is no reason to refuse a run."""
    from cost_models.catalog import find_cluster

    if not config.cluster:
        return None, ""
    try:
        return find_cluster(config.cluster).device.peak_flops(config.workload.numbers.compute), ""
    except TitanPlanError as error:
        return None, error.message
