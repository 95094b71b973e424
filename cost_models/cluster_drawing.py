"""A plain-text picture of a cluster: its device and its tiers from the network inwards, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cost_models.cluster import ClusterSpec, DeviceSpec, TierSpec

_WIDTH: Final = 100
_GIB: Final = 2**30
_WORTH_GIB: Final = 10


def draw_tiers(cluster: ClusterSpec) -> str:
    """Return the picture for `titan-plan clusters show NAME`; bandwidths are per device and direction."""
    lines = [cluster.name, *textwrap.wrap(cluster.description, _WIDTH), ""]
    outermost_first = range(len(cluster.tiers) - 1, -1, -1)
    for depth, index in enumerate(outermost_first):
        lines += _tier_lines(cluster, index, "|  " * depth)
    lines += _device_lines(cluster.device, "|  " * len(cluster.tiers))
    lines += ["", *_reserve_lines(cluster)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _tier_lines(cluster: ClusterSpec, index: int, indent: str) -> list[str]:
    tier = cluster.tiers[index]
    inner = cluster.tiers[index - 1] if index else None
    head = f"{indent}+- {tier.name}: {_size(cluster, tier, inner)}"
    return [head, *_wrapped(indent + "|     ", [_bandwidth(tier, inner), _steps(tier)])]


def _size(cluster: ClusterSpec, tier: TierSpec, inner: TierSpec | None) -> str:
    node = " (a node)" if tier.devices == cluster.devices_per_node else ""
    if not tier.devices:
        return f"any number of {inner.name if inner else 'device'} units, {_links(tier, inner)}"
    if inner is None:
        return f"{tier.devices} devices{node}, {_links(tier, inner)}"
    return f"{tier.devices} devices = {tier.devices // inner.devices} {inner.name} units{node}, {_links(tier, inner)}"


def _links(tier: TierSpec, inner: TierSpec | None) -> str:
    if tier.kind == "switch":
        return "one port per device into a switch"
    if tier.kind == "bus":
        return "one path from each device to its partner"
    blocks = tier.devices // (inner.devices if inner else 1)
    return "full mesh, " + ("1 link per device" if blocks == 2 else f"{blocks - 1} links per device")


def _bandwidth(tier: TierSpec, inner: TierSpec | None) -> str:
    unit = {"mesh": "a link", "switch": "a port", "bus": "a path"}[tier.kind]
    text = (
        f"{unit} {tier.link_bandwidth_bytes_per_s / 1e9:.4g} GB/s nominal, "
        f"{tier.reachable_bandwidth_bytes_per_s / 1e9:.4g} reachable"
    )
    if tier.kind != "mesh" or tier.devices == 2:
        return text
    blocks = tier.devices // (inner.devices if inner else 1)
    whole = tier.reachable_bandwidth_bytes_per_s * (blocks - 1) / 1e9
    pair = tier.reachable_bandwidth_bytes_per_s / 1e9
    return f"{text}; a group of 2 gets {pair:.4g}, of {blocks} gets {whole:.4g}"


def _steps(tier: TierSpec) -> str:
    ramp = ""
    if tier.half_bandwidth_bytes:
        ramp = f", half bandwidth at {tier.half_bandwidth_bytes / 2**10:.4g} KiB a message"
    return f"a step {tier.latency_s * 1e6:.4g} us{ramp}; algorithms {', '.join(tier.algorithms)}"


def _device_lines(device: DeviceSpec, indent: str) -> list[str]:
    peaks = ", ".join(f"{name} {_flops(value)}" for name, value in device.peak_flops_by_precision)
    memory = (
        f"{_gib(device.memory_bytes)} memory, {_gib(device.usable_memory_bytes)} usable, "
        f"{device.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s; "
        f"host {device.host_bandwidth_bytes_per_s / 1e9:.4g} GB/s each way"
    )
    compute = f"{peaks}; vector {_flops(device.vector_flops)}; {device.cores} cores"
    notes = [device.notes] if device.notes else []
    return [f"{indent}+- {device.name}", *_wrapped(indent + "      ", [compute, memory, *notes])]


def _reserve_lines(cluster: ClusterSpec) -> list[str]:
    bound = f"at most {cluster.max_devices} devices" if cluster.max_devices else "no bound on devices"
    first = (
        f"{cluster.devices_per_node} devices and {_gib(cluster.host_memory_bytes)} of host memory a node, {bound}, "
        f"{cluster.collective_library}"
    )
    second = (
        f"reserved on a device: context {_gib(cluster.device.context_bytes)}, each communicator "
        f"{_gib(cluster.communicator_buffer_bytes)}, and {_gib(cluster.p2p_buffer_bytes)} where it sends and receives"
    )
    return _wrapped("", [first, second])


def _wrapped(indent: str, texts: list[str]) -> list[str]:
    lines: list[str] = []
    for text in texts:
        lines += textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
    return lines


def _gib(n_bytes: float) -> str:
    gib = n_bytes / _GIB
    return f"{gib:.4g} GiB" if gib >= _WORTH_GIB else f"{gib:.2f} GiB"


def _flops(flops: float) -> str:
    return f"{flops / 1e12:.4g} TFLOPS" if flops >= 1e12 else f"{flops / 1e9:.4g} GFLOPS"
