"""The device inside a training process: torch.cuda and torch.npu behind one class, a CPU behind another."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from cost_models.errors import TitanPlanError

from .device_kinds import BACKENDS

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class AcceleratorDevice:
    """An NPU or a GPU. `torch.npu` has the functions of `torch.cuda`, so that one class serves both."""

    def __init__(self, kind: str, local_rank: int) -> None:
        self._torch: Any = _namespace(kind)
        count = self._torch.device_count() if self._torch.is_available() else 0
        if local_rank >= count:
            message = f"local rank {local_rank} needs {kind}:{local_rank}, this process sees {count} {kind} devices"
            seen = "ASCEND_RT_VISIBLE_DEVICES" if kind == "npu" else "CUDA_VISIBLE_DEVICES"
            raise TitanPlanError("R722", message, f"start fewer ranks here, or look at {seen}", exit_code=3)
        self.kind = kind
        self.backend = BACKENDS[kind]
        self.torch_device = torch.device(kind, local_rank)
        self.can_pin = True

    def set_current(self) -> None:
        """Make it the current device of the process."""
        self._torch.set_device(self.torch_device)

    def synchronize(self) -> None:
        """Wait until everything issued is done."""
        self._torch.synchronize(self.torch_device)

    def memory_allocated(self) -> int:
        """Bytes of tensors; what the allocator has cached on top is not counted."""
        return int(self._torch.memory_allocated(self.torch_device))

    def peak_memory(self) -> int:
        """Largest of it since the last reset, bytes."""
        return int(self._torch.max_memory_allocated(self.torch_device))

    def reset_peak_memory(self) -> None:
        """Forget the peak."""
        self._torch.reset_peak_memory_stats(self.torch_device)

    def total_memory(self) -> int:
        """Bytes of the device."""
        return int(self._torch.get_device_properties(self.torch_device).total_memory)

    def empty_cache(self) -> None:
        """Give cached blocks back to the driver."""
        self._torch.empty_cache()

    def rng_state(self) -> torch.Tensor:
        """State of the device's generator."""
        state: torch.Tensor = self._torch.get_rng_state(self.torch_device)
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Go on from a state."""
        self._torch.set_rng_state(state, self.torch_device)

    def new_stream(self) -> Any:  # noqa: ANN401 - torch.cuda.Stream or torch.npu.Stream
        """A stream beside the current one."""
        return self._torch.Stream(device=self.torch_device)

    def current_stream(self) -> Any:  # noqa: ANN401 - as for new_stream
        """The stream that work is issued to."""
        return self._torch.current_stream(self.torch_device)

    def stream_context(self, stream: Any) -> AbstractContextManager[Any]:  # noqa: ANN401 - as for new_stream
        """Issue to a stream inside `with`."""
        context: AbstractContextManager[Any] = self._torch.stream(stream)
        return context

    def wait_stream(self, waiting: Any, awaited: Any) -> None:  # noqa: ANN401 - as for new_stream
        """What is issued to `waiting` from now on starts after what `awaited` holds."""
        waiting.wait_stream(awaited)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned host memory."""
        return tensor.pin_memory()

    def host_like(self, x: torch.Tensor) -> torch.Tensor:
        """Pinned host memory for a tensor."""
        return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)

    def numbers(self, x: torch.Tensor) -> list[float]:
        """The values of a small tensor; waits for them."""
        return list(x.tolist())


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""mallopt(3)'s parameters."""


def _keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next step, as the allocator of an accelerator does.

    It would give large pieces back to the kernel, which then clears every page again: 3 % of a small model's step. C
    libraries without mallopt do as they like.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 * 2**20)  # its greatest: larger pieces are the kernel's, and go back
        mallopt(_TRIM_THRESHOLD, 2**30)


class CpuDevice:
    """The cores of the machine. Ranks share them and its memory; streams do not exist."""

    kind = "cpu"
    backend = BACKENDS["cpu"]
    can_pin = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._floor = 0
        _keep_freed_memory()

    def set_current(self) -> None:
        """Nothing to choose."""

    def synchronize(self) -> None:
        """Nothing runs behind our back."""

    def memory_allocated(self) -> int:
        """Resident set of the process, bytes: tensors, but also the interpreter and its libraries."""
        import psutil

        return int(psutil.Process().memory_info().rss)

    def peak_memory(self) -> int:
        """Largest resident set, bytes.

        The kernel keeps one high-water mark for the life of the process. Only a peak above that of the last reset is
        therefore known to be new; below it, what is resident now is all that can be said.
        """
        peak = _max_rss_bytes()
        return peak if peak > self._floor else self.memory_allocated()

    def reset_peak_memory(self) -> None:
        """Count only what rises above the mark reached so far."""
        self._floor = _max_rss_bytes()

    def total_memory(self) -> int:
        """Bytes of the machine."""
        import psutil

        return int(psutil.virtual_memory().total)

    def empty_cache(self) -> None:
        """The C library keeps its own."""

    def rng_state(self) -> torch.Tensor:
        """State of torch's default generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Go on from a state."""
        torch.set_rng_state(state)

    def new_stream(self) -> None:
        """There is none."""

    def current_stream(self) -> None:
        """There is none."""

    def stream_context(self, _stream: object) -> AbstractContextManager[Any]:
        """Nothing changes inside `with`."""
        return nullcontext()

    def wait_stream(self, _waiting: object, _awaited: object) -> None:
        """Everything is in order already."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself: without a device there is nobody to copy to."""
        return tensor

    def host_like(self, x: torch.Tensor) -> torch.Tensor:
        """Plain memory."""
        return torch.empty(x.shape, dtype=x.dtype, device="cpu")

    def numbers(self, x: torch.Tensor) -> list[float]:
        """The values of a small tensor."""
        return list(x.tolist())


def _max_rss_bytes() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB, macOS bytes


def _namespace(kind: str) -> Any:  # noqa: ANN401 - a module of functions that torch does not type
    """torch.cuda, or torch.npu, which exists once torch_npu is imported."""
    if kind == "npu":
        try:
            import_module("torch_npu")
        except Exception as error:  # ImportError, OSError of a missing library, RuntimeError of a driver
            hint = "source set_env.sh of CANN, and install the torch_npu of this torch"
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TitanPlanError("R722", f"torch_npu cannot be imported: {reason}", hint, exit_code=3) from error
    return getattr(torch, kind)
