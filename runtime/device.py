"""Devices of this machine: which kind there is, how many, and how a training process talks to its own one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

from cost_models.errors import TitanPlanError

from .device_environment import safe_environment
from .device_kinds import BACKENDS, CHOICE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import torch

_AFTER_KILL_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What this machine trains on.

    Attributes:
        kind: npu, cuda or cpu.
        backend: hccl, nccl or gloo.
        count: devices that ranks can have; on a CPU the cores that this process may use.
        names: one for each device; of a CPU one.
        memory_bytes: of one device; of a CPU what the machine has free, which all ranks share.
        notes: why something that is installed or asked for is not used.
    """

    kind: str
    backend: str
    count: int
    names: tuple[str, ...] = ()
    memory_bytes: int = 0
    notes: tuple[str, ...] = ()


def find_devices(timeout_s: float = 60.0, *, probe: str = "runtime.device_probe") -> Devices:
    """Look for NPUs, then GPUs; a CPU is always there. TITAN_PLAN_DEVICE=cpu|cuda|npu decides instead.

    A process of its own looks. With torch_npu installed and no CANN sourced `import torch` itself fails (its entry
    point of the group `torch.backends` is loaded by torch), a driver may hang, and an initialised device would go into
    every fork: none of that may reach the caller, who does not even import torch.

    Args:
        timeout_s: how long the probe may take; a probe that is later counts for what it has said until then.
        probe: module that looks, for tests.
    """
    wanted = os.environ.get(CHOICE, "").strip().lower()
    if wanted and wanted not in BACKENDS:
        raise TitanPlanError("C611", f"{CHOICE} is {wanted[:40]!r}", f"one of {', '.join(BACKENDS)} is needed")
    if wanted == "cpu":
        return _cpu((f"{CHOICE}=cpu",))
    told = _probe(timeout_s, probe)
    notes = tuple(str(line["note"]) for line in told if "note" in line)
    for kind in (wanted,) if wanted else ("npu", "cuda"):
        for found in (line for line in told if line.get("kind") == kind and line.get("count")):
            return _accelerator(kind, found, notes)
    if wanted:
        return Devices(kind=wanted, backend=BACKENDS[wanted], count=0, notes=(f"{CHOICE}={wanted}", *notes))
    return _cpu(notes)


def _accelerator(kind: str, found: Mapping[str, Any], notes: tuple[str, ...]) -> Devices:
    return Devices(
        kind=kind,
        backend=BACKENDS[kind],
        count=int(found["count"]),
        names=tuple(map(str, found.get("names", ()))),
        memory_bytes=int(found.get("memory_bytes", 0)),
        notes=notes,
    )


def _cpu(notes: tuple[str, ...]) -> Devices:
    import platform

    import psutil

    return Devices(
        kind="cpu",
        backend=BACKENDS["cpu"],
        count=usable_cores(),
        names=(platform.processor() or platform.machine() or "cpu",),
        memory_bytes=psutil.virtual_memory().available,
        notes=notes,
    )


def usable_cores() -> int:
    """Cores that this process may run on: taskset, cpusets and schedulers leave fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _probe(timeout_s: float, module: str) -> list[dict[str, Any]]:
    """What the probe said, line by line, and why it ended early if it did."""
    # Files, not pipes: a grandchild that hangs in a driver would hold a pipe open after the probe is killed.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as complaints:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", module],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=complaints,
                env={**safe_environment(os.environ), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                start_new_session=True,
            )
        except OSError as error:
            return [{"note": f"the device probe did not start: {error.strerror}"}]
        ended = _wait(process, timeout_s)
        told = _lines(out)
        if ended is None:
            return [*told, {"note": f"the device probe hung {_where(told)}and was stopped after {timeout_s:g} s"}]
        if ended:
            return [*told, {"note": f"the device probe died {_where(told)}({ended}): {_last_line(complaints)}"}]
        return told


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit code; None where the time was up."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process that sleeps inside a driver cannot be killed; it is not waited for.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_AFTER_KILL_S)
        return None


def _lines(stream: IO[bytes]) -> list[dict[str, Any]]:
    """The JSON objects of a probe; drivers print other things to stdout as well."""
    stream.seek(0)
    found: list[dict[str, Any]] = []
    for line in stream.read().decode("utf-8", "replace").splitlines():
        with suppress(ValueError):
            value = json.loads(line)
            found += [value] if isinstance(value, dict) else []
    return found


def _where(told: list[dict[str, Any]]) -> str:
    steps = [line["step"] for line in told if "step" in line]
    return f"in {steps[-1]} " if steps else ""


def _last_line(stream: IO[bytes]) -> str:
    stream.seek(0)
    lines = [line for line in stream.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "it said nothing"


class TrainDevice(Protocol):
    """The device of one rank, inside its training process. On a CPU streams are None and do nothing.

    Attributes:
        kind: npu, cuda or cpu.
        torch_device: where tensors go.
        backend: of torch.distributed: hccl, nccl or gloo.
        can_pin: copies from pinned host memory may run beside computing.
    """

    kind: str
    torch_device: torch.device
    backend: str
    can_pin: bool

    def set_current(self) -> None:
        """Make it the current device of the process."""

    def synchronize(self) -> None:
        """Wait until everything issued is done."""

    def memory_allocated(self) -> int:
        """Bytes of tensors; on a CPU the resident set of the whole process, code and libraries included."""

    def peak_memory(self) -> int:
        """Largest of it since the last reset, bytes; on a CPU since the process began where nothing else is known."""

    def reset_peak_memory(self) -> None:
        """Forget the peak."""

    def total_memory(self) -> int:
        """Bytes of the device; on a CPU of the machine."""

    def empty_cache(self) -> None:
        """Give cached blocks back to the driver."""

    def rng_state(self) -> torch.Tensor:
        """State of the device's generator, bytes on the CPU."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Go on from a state of `rng_state`."""

    def new_stream(self) -> Any:  # noqa: ANN401 - torch.cuda.Stream, torch.npu.Stream or None
        """A stream beside the current one."""

    def current_stream(self) -> Any:  # noqa: ANN401 - as for new_stream
        """The stream that work is issued to."""

    def stream_context(self, stream: Any) -> AbstractContextManager[Any]:  # noqa: ANN401 - as for new_stream
        """Issue to a stream inside `with`."""

    def wait_stream(self, waiting: Any, awaited: Any) -> None:  # noqa: ANN401 - as for new_stream
        """What is issued to `waiting` from now on starts after what `awaited` holds."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor in pinned memory; on a CPU the tensor itself."""

    def host_like(self, x: torch.Tensor) -> torch.Tensor:
        """Memory of the host for a tensor of this device, pinned where that can be."""

    def numbers(self, x: torch.Tensor) -> list[float]:
        """The values of a small tensor; waits for them."""


def open_device(kind: str, local_rank: int) -> TrainDevice:
    """The device of a rank; imports torch, and torch_npu for NPUs. Makes it the current one.

    Raises:
        TitanPlanError: C611 for an unknown kind, R722 (exit code 3) where the device cannot be had.
    """
    if kind not in BACKENDS:
        raise TitanPlanError("C611", f"device kind {kind[:40]!r}", f"one of {', '.join(BACKENDS)} is needed")
    from .device_training import AcceleratorDevice, CpuDevice

    make: Callable[[], TrainDevice] = CpuDevice if kind == "cpu" else lambda: AcceleratorDevice(kind, local_rank)
    device = make()
    device.set_current()
    return device
