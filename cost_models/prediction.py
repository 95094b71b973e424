"""Prediction: memory and step time of layouts with what people read off them (MFU, tokens/s, interval, P(fits))."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cost_models.memory import MemoryEstimate, MemoryModel
from cost_models.step_time import StepTimeModel, TimeEstimate

if TYPE_CHECKING:
    from cost_models.layout import Column, Layouts
    from cost_models.setting import Setting

# Half width of an 80 % interval of a normal distribution, in standard deviations.
_EIGHTY_PERCENT = 1.2815515655446004


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a set of layouts will use and how long a step takes; columns in the shape of the layouts.

    Attributes:
        step_time_low_s, step_time_high_s: 80 % interval from the calibration's residuals.
        mfu: model FLOPs (causal attention counted half, no recompute) over peak FLOPs of the precision.
        hfu: the FLOPs that the device computes, recomputation included, over peak.
        headroom_bytes: what the device has left over at the peak; negative where it does not fit.
        p_fits: probability that the peak stays below the device's memory.
        host_bytes_per_node: swapped and offloaded bytes of a node.
    """

    memory: MemoryEstimate
    time: TimeEstimate
    step_time_s: Column
    step_time_low_s: Column
    step_time_high_s: Column
    tokens_per_s_per_device: Column
    mfu: Column
    hfu: Column
    headroom_bytes: Column
    p_fits: Column
    host_bytes_per_node: Column


def predict(setting: Setting, layouts: Layouts) -> Prediction:
    """Memory and time of valid layouts. What invalid layouts would take is not defined: filter by the rules first."""
    memory = MemoryModel(setting, layouts).estimate()
    time = StepTimeModel(setting, layouts).estimate()
    step = np.broadcast_to(time.step_s, layouts.shape)
    spread = math.exp(_EIGHTY_PERCENT * setting.calibration.time_sigma)
    peak_flops = peak_flops_per_device(setting)
    headroom = usable_bytes(setting) - memory.peak_bytes
    return Prediction(
        memory=memory,
        time=time,
        step_time_s=step,
        step_time_low_s=step / spread,
        step_time_high_s=step * spread,
        tokens_per_s_per_device=setting.workload.tokens / (step * setting.n_devices),
        mfu=model_flops(setting) / (step * setting.n_devices * peak_flops),
        hfu=np.broadcast_to(time.hardware_flops, layouts.shape) / (step * peak_flops),
        headroom_bytes=headroom,
        p_fits=_normal_cdf(headroom / (setting.calibration.memory_sigma * memory.allocated_bytes)),
        host_bytes_per_node=memory.host_bytes * min(setting.cluster.devices_per_node, setting.n_devices),
    )


def peak_flops_per_device(setting: Setting) -> float:
    """Peak of the precision that the GEMMs run in, FLOP/s."""
    return setting.cluster.device.peak_flops(setting.workload.numbers.compute)


def model_flops(setting: Setting) -> float:
    """Model FLOPs of a step over all devices: forward and twice that for backward."""
    workload = setting.workload
    return 3.0 * setting.model.forward_flops_per_sequence(workload.seq_len) * workload.global_batch


def usable_bytes(setting: Setting) -> int:
    """Memory that torch reports for the device."""
    return setting.cluster.device.usable_memory_bytes


def host_budget_bytes(setting: Setting) -> float:
    """Host memory of a node that swap may take: the rest belongs to the system, the data loader and pinned copies."""
    return 0.8 * setting.cluster.host_memory_bytes


def _normal_cdf(z: Column) -> Column:
    """Standard normal distribution function, by the logistic form of Bowling et al. 2009 (error under 0.00014)."""
    bounded = np.clip(z, -8.0, 8.0)
    return 1.0 / (1.0 + np.exp(-(0.07056 * bounded**3 + 1.5976 * bounded)))
