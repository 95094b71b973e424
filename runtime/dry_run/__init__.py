"""One step of the real trainer at full size without hardware: fake tensors, a fake process group, one process."""

from __future__ import annotations

from .run import dry_run
from .values import DryRun, LiveTensor, Message

__all__ = ["DryRun", "LiveTensor", "Message", "dry_run"]
