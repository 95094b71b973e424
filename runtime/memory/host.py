"""Host memory that a device copies to and from while it computes: pinned where the device can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.device import TrainDevice


def to_host(x: Tensor, device: TrainDevice) -> Tensor:
    """Start a copy to the host on the current stream; it is whole once that stream has got there."""
    return device.host_like(x).copy_(x, non_blocking=device.can_pin)


def to_device(x: Tensor, device: TrainDevice) -> Tensor:
    """Start a copy to the device on the current stream."""
    return torch.empty(x.shape, dtype=x.dtype, device=device.torch_device).copy_(x, non_blocking=device.can_pin)
