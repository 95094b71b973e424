"""The kinds of device that ranks run on, and the communication backend of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

BACKENDS: Final[Mapping[str, str]] = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
"""Kind of device -> the backend of torch.distributed that serves it."""

CHOICE: Final = "TITAN_PLAN_DEVICE"
"""Variable that decides the kind: a user's wish, and what a launch tells its ranks."""

KIND_OF_VENDOR: Final[Mapping[str, str]] = {"ascend": "npu", "nvidia": "cuda", "cpu": "cpu"}
"""Vendor of a cluster's device -> kind."""
