"""This process among those of the run: what torchrun told it, its device, and the process group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from cost_models.errors import TitanPlanError

from .device_kinds import BACKENDS, CHOICE

if TYPE_CHECKING:
    from .device import TrainDevice

TIMEOUT: Final = "TITAN_PLAN_TIMEOUT_S"
"""Seconds that a collective may take before a rank counts as gone."""
_TIMEOUT_S: Final = 1800.0
_MOST_S: Final = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One rank.

    Attributes:
        environ: what torchrun has set.
    """

    rank: int
    local_rank: int
    world_size: int
    environ: Mapping[str, str]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Process:
        """From torchrun's variables; without them, a run of one process."""
        found = {name: _number(environ, name, default) for name, default in _DEFAULTS.items()}
        rank, world_size = found["RANK"], found["WORLD_SIZE"]
        if rank >= world_size:
            message = f"environment variable RANK is {rank}, WORLD_SIZE is {world_size}"
            raise TitanPlanError("C617", message, "ranks count from 0 to WORLD_SIZE - 1; torchrun sets both")
        _timeout_s(environ)  # refused now, not where ranks meet
        return cls(rank=rank, local_rank=found["LOCAL_RANK"], world_size=world_size, environ=dict(environ))

    def device_kind(self) -> str:
        """npu, cuda or cpu: as the launcher found, or what is here. torch_npu is tried in a process of its own."""
        chosen = self.environ.get(CHOICE, "")
        if chosen in BACKENDS:
            return chosen
        if chosen or find_spec("torch_npu") is not None:
            from .device import find_devices

            return find_devices().kind
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def join(self, device: TrainDevice) -> None:
        """Meet the other ranks; one process meets nobody. R76x errors say where to look."""
        if self.world_size == 1:
            return
        import torch.distributed as dist

        from .faults import connection_error

        # Checkpoints travel by gloo whatever the device's own library is.
        backend = "gloo" if device.kind == "cpu" else f"cpu:gloo,{device.kind}:{device.backend}"
        timeout = timedelta(seconds=_timeout_s(self.environ))
        try:
            dist.init_process_group(
                backend,
                **self._meeting(timeout),
                timeout=timeout,
                device_id=device.torch_device if device.kind == "cuda" else None,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise connection_error(error, self.environ) from error

    def _meeting(self, timeout: timedelta) -> dict[str, Any]:
        """Where ranks meet; empty for what torch makes of the environment.

        With a static rendezvous (`--master_port`) torchrun keeps its store when it restarts ranks, and torch would find
        the addresses of the dead in it: each attempt has keys of its own.
        """
        address, port = self.environ.get("MASTER_ADDR"), self.environ.get("MASTER_PORT", "")
        if self.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not address or not port.isdecimal():
            return {}
        import torch.distributed as dist

        # torch.distributed documents both without exporting their types.
        store = dist.TCPStore(address, int(port), self.world_size, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        attempt = self.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return {
            "store": dist.PrefixStore(f"attempt-{attempt}", store),  # type: ignore[attr-defined]
            "rank": self.rank,
            "world_size": self.world_size,
        }

    def leave(self) -> None:
        """Close the process group, if there is one."""
        if self.world_size == 1:
            return
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


_DEFAULTS: Final = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
_MOST_DIGITS: Final = 9


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    given = environ.get(name, "")
    if not given:
        return default
    if not given.isdecimal() or len(given) > _MOST_DIGITS:
        raise TitanPlanError("C617", f"environment variable {name} is {given!r}", "torchrun sets it to a whole number")
    return int(given)


def _timeout_s(environ: Mapping[str, str]) -> float:
    given = environ.get(TIMEOUT, "")
    try:
        seconds = float(given) if given else _TIMEOUT_S
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MOST_S:
        message = f"environment variable {TIMEOUT} is {given!r}"
        raise TitanPlanError("C617", message, f"seconds above 0, and at most {_MOST_S:.0f}, are needed")
    return seconds
