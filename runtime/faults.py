"""What ends a run in the middle, told as what happened and what to try; the parts are in their own files.

`StopRequest` for the wish to stop, `connection_error` for links between processes, and here: numbers that overflow,
memory that runs out, a disk that is full.
"""

from __future__ import annotations

import errno
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cost_models.errors import TitanPlanError
from runtime.connection_faults import connection_error, is_connection_error
from runtime.error_texts import chain, in_order, shorten_text
from runtime.stop_request import StopRequest

if TYPE_CHECKING:
    from runtime.config_values import TrainConfig

__all__ = [
    "StopRequest",
    "connection_error",
    "disk_full",
    "is_connection_error",
    "non_finite_loss",
    "out_of_memory",
]

_FAILED: Final = 1
_GIB: Final = 2**30
# torch_npu, CANN (EL0004) and HCCL (EI0011), CUDA, and torch's allocator of host memory, each in its own words.
_NO_MEMORY: Final = re.compile(
    r"out of memory|EL0004|EI0011|can't allocate memory|Cannot allocate memory|alloc_cpu\.cpp", re.IGNORECASE
)
# torch.save loses errno: its zip writer only notices that the file is shorter than it should be.
_SHORT_FILE: Final = re.compile(r"inline_container\.cc.*(?:unexpected pos|write failed)|PytorchStreamWriter failed")
_DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def non_finite_loss(step: int, rank: int, precision: str, loss_scale: float | None) -> TitanPlanError:
    """The loss is not a number, and no step can be made of it.

    Args:
        loss_scale: in force at this step in fp16; None for other precisions.
    """
    scale = "" if loss_scale is None else f", loss scale {loss_scale:g}"
    message = f"loss of step {step} is not finite on rank {rank} (precision {precision}{scale})"
    tries = [
        f"skip the batch: start again from the last checkpoint before step {step} with another order of the data "
        "(--set training.seed=N)"
    ]
    if precision == "fp16":
        lower = 128.0 if loss_scale is None or loss_scale > 128 else loss_scale / 2
        tries += [f"a lower loss scale (optimization.loss_scale: {lower:g}, or dynamic)"]
    if precision in {"fp16", "fp8"}:
        tries += ["optimization.precision: bf16, which has the range of fp32"]
    tries += ["a lower training.lr, or more training.warmup_steps", "optimization.gradient_clip: 1.0, or below it"]
    return TitanPlanError("R750", message, in_order(tries), exit_code=_FAILED)


def out_of_memory(error: BaseException, config: TrainConfig) -> TitanPlanError | None:
    """What saves memory and is not in use yet, in the order of the users' guide; None for any other error."""
    errors = list(chain(error))
    named = any(kind.__name__ in {"OutOfMemoryError", "MemoryError"} for one in errors for kind in type(one).__mro__)
    telling = next((str(one) for one in errors if _NO_MEMORY.search(str(one))), "")
    if not named and not telling:
        return None
    message = f"out of memory with {config.layout.name}: {shorten_text(telling or str(error))}"
    tries = _memory_savers(config)
    hint = in_order(tries) if tries else "all that saves memory is on: more devices, or a larger tp_size or pp_size"
    return TitanPlanError(
        "R751", message, f"{hint}; `titan-plan --model ... --npus N` finds what fits", exit_code=_FAILED
    )


def _memory_savers(config: TrainConfig) -> list[str]:
    x = config.layout
    tries = []
    if x.recompute != "full" or x.recompute_layers:
        tries += [f"optimization.gradient_checkpointing: true (now {x.recompute_text})"]
    if x.zero < 3 and x.dp * x.cp > 1:
        tries += [f"optimization.zero_stage: 3 (now {x.zero})"]
    if x.micro_batch > 1:
        # The global batch stays: it is the product of the three.
        more = x.micro_batch * x.accumulation
        tries += [f"training.micro_batch_size: 1 with gradient_accumulation_steps: {more} (now {x.micro_batch})"]
    tries += [] if x.activation_offload else ["optimization.activation_cpu_offload: true"]
    return tries + ([] if x.swap_optimizer else ["optimization.swap_optimizer: true"])


def disk_full(error: BaseException, path: Path | str | None = None) -> TitanPlanError | None:
    """What to do where a checkpoint did not fit its disk; None for any other error.

    Args:
        path: what was being written; by default what the error names.
    """
    errors = list(chain(error))
    found = next((one for one in errors if isinstance(one, OSError) and one.errno in _DISK_ERRORS), None)
    if found is None and not any(_SHORT_FILE.search(str(one)) for one in errors):
        return None
    named = path or (found.filename if found is not None else None) or "the output folder"
    why = (
        "the quota of this user is used up" if found is not None and found.errno == errno.EDQUOT else "the disk is full"
    )
    message = f"{named} cannot be written: {why}{_free(Path(str(named)))}"
    hint = "free some space, or set training.output_dir to another disk or training.checkpoint.keep to a lower number; "
    hint += "the checkpoint before this one is whole, and training resumes from it"
    return TitanPlanError("R752", message, hint, exit_code=_FAILED)


def _free(path: Path) -> str:
    """Free space where the path is or would be; empty where nobody can tell."""
    for place in (path, *path.parents):
        with suppress(OSError):
            free = shutil.disk_usage(place).free
            return f", {free} bytes ({free / _GIB:.2f} GiB) are free"
    return ""
