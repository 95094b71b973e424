"""Whether this machine can carry a run, told before anything starts, with what would fit instead."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from cost_models.catalog import find_cluster
from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    from .config_values import TrainConfig
    from .device import Devices

RANKS_PER_CORE: Final = 4
"""Ranks on a CPU share cores: a rehearsal is slower then, not wrong. Beyond this they mostly wait for each other."""

# Weight, gradient and two moments in fp32, or what mixed precision has in their place; sharded or not, the ranks of one
# machine hold each of them once at the least.
_STATE_BYTES: Final = 16


def most_ranks(devices: Devices) -> int:
    """Ranks that this machine carries."""
    return devices.count * (RANKS_PER_CORE if devices.kind == "cpu" else 1)


def check_devices(config: TrainConfig, devices: Devices) -> None:
    """Refuse a run that needs more than this machine has.

    Raises:
        TitanPlanError: R720, with what would fit.
    """
    ranks, most = config.world_size, most_ranks(devices)
    if ranks > most:
        where = f" ({config.cluster})" if config.cluster else ""
        wanted = f"{ranks} devices" if ranks > 1 else "1 device"
        message = f"{config.origin} is for {wanted}{where}, this machine has {describe(devices)}"
        raise TitanPlanError("R720", message, _mend(config, devices, most))
    states = config.model.total_params * _STATE_BYTES
    if devices.kind == "cpu" and states > devices.memory_bytes:
        message = (
            f"{config.origin}: {config.model.name} takes at least {states / 2**30:.1f} GiB for weights, gradients and "
            f"optimizer, this machine has {devices.memory_bytes / 2**30:.1f} GiB free and no NPU or GPU in use"
        )
        raise TitanPlanError("R720", _noted(message, devices), "--local rehearses the same layout with a tiny model")


def describe(devices: Devices) -> str:
    """The devices in words, and why others are not used."""
    if devices.kind == "cpu":
        text = f"no NPU or GPU in use and {devices.count} CPU cores, for at most {most_ranks(devices)} ranks"
    else:
        name = f" ({devices.names[0]})" if devices.names else ""
        text = f"{devices.count} {devices.kind} device{'s' if devices.count != 1 else ''}{name}"
    return _noted(text, devices)


def _noted(text: str, devices: Devices) -> str:
    return f"{text} [{'; '.join(devices.notes)}]" if devices.notes else text


def _mend(config: TrainConfig, devices: Devices, most: int) -> str:
    ways = ["--local rehearses the same layout here with a tiny model"] if most else []
    if most and devices.kind != "cpu":
        ways.append(f"titan-plan --model {config.model.name} --npus {most} plans for {most}")
    nodes = _nodes(config, devices)
    if nodes > 1:
        hosts = "HOST1,HOST2" + {2: "", 3: ",HOST3"}.get(nodes, f",...,HOST{nodes}")
        ways.append(f"--nodes {hosts} shows what each of {nodes} nodes has to run")
    return "; ".join(ways) or "start it on the machines that it was planned for"


def _nodes(config: TrainConfig, devices: Devices) -> int:
    """Nodes that the run was planned for; as many as this one where nobody says."""
    per_node = devices.count
    if config.cluster:
        # It may be a file that is on another machine; the number is only a hint.
        with suppress(TitanPlanError):
            per_node = find_cluster(config.cluster).devices_per_node
    return -(-config.world_size // per_node) if per_node else 0
