"""What a cluster is: a device, the tiers of links that join devices near to far, and what each process reserves.

Words: a *device* is what torch sees as one (a 910B, one die of a 910C, a GPU). A *tier* is one kind of link with
the number of devices that one unit of it holds, counted cumulatively: die pair 2, node 16, superpod 768, network 0
(no bound). Bandwidths are bytes per second, per device and per direction; 1 GB/s = 1e9 B/s.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Final

from cost_models.errors import TitanPlanError

VENDORS: Final = ("ascend", "nvidia", "cpu")
TIER_KINDS: Final = ("mesh", "switch", "bus")
COLLECTIVE_LIBRARIES: Final = ("hccl", "nccl", "gloo")
PRECISIONS: Final = ("bf16", "fp16", "fp32", "fp8")


def _require(owner: str, checks: dict[str, bool]) -> None:
    for what, holds in checks.items():
        if not holds:
            raise TitanPlanError("C610", f"{owner}: {what} does not hold")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One device as torch sees it.

    `peak_flops_by_precision` holds dense matrix peaks in FLOP/s; for Ascend the core-count number (ascend.md 1.1),
    because measured peaks stay below it and the marketing number only scales the efficiency.
    `cores`, `gemm_tile_m`, `gemm_tile_n` say how a GEMM is cut over the device (cube cores or SMs).
    `context_bytes` is what driver and runtime take on the device for each process, outside torch's allocator.
    """

    name: str
    vendor: str
    peak_flops_by_precision: tuple[tuple[str, float], ...]
    vector_flops: float
    """FLOP/s of the vector units in fp32, in which norms, softmax and optimizers compute."""
    memory_bytes: int
    """Raw capacity of the HBM."""
    usable_memory_bytes: int
    """What torch reports as total memory: raw less firmware's part; contexts and buffers still come off it."""
    memory_bandwidth_bytes_per_s: float
    cores: int
    gemm_tile_m: int = 128
    gemm_tile_n: int = 256
    l2_bytes: int = 0
    host_bandwidth_bytes_per_s: float = 0.0
    """Host memory <-> device, each direction, pinned; per device when all devices of the node copy at once."""
    context_bytes: int = 0
    notes: str = field(default="", compare=False)
    sources: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse numbers that no device has."""
        _require(
            f"device {self.name}",
            {
                f"vendor in {VENDORS} (got {self.vendor!r})": self.vendor in VENDORS,
                f"precisions in {PRECISIONS}": all(name in PRECISIONS for name, _ in self.peak_flops_by_precision),
                "fp32 peak given": any(name == "fp32" for name, _ in self.peak_flops_by_precision),
                "peaks > 0": all(value > 0 for _, value in self.peak_flops_by_precision),
                "vector FLOPS > 0": self.vector_flops > 0,
                "0 < usable memory <= memory": 0 < self.usable_memory_bytes <= self.memory_bytes,
                "memory bandwidth > 0": self.memory_bandwidth_bytes_per_s > 0,
                "cores and tiles > 0": min(self.cores, self.gemm_tile_m, self.gemm_tile_n) > 0,
                "host bandwidth, L2 and context >= 0": min(
                    self.host_bandwidth_bytes_per_s, self.l2_bytes, self.context_bytes
                )
                >= 0,
            },
        )

    def has_precision(self, precision: str) -> bool:
        """Tell whether the matrix unit computes in this precision natively."""
        return any(name == precision for name, _ in self.peak_flops_by_precision)

    @property
    def default_precision(self) -> str:
        """The half precision to train in: bf16, or fp16 on a device without it (910A, V100)."""
        return "bf16" if self.has_precision("bf16") else "fp16"

    def peak_flops(self, precision: str) -> float:
        """Return the dense matrix peak, FLOP/s.

        fp8 on a device without it runs at the half-precision peak: the operands are cast up. bf16 on a device without
        it (910A, V100) is an error and not a silent fp16: the run itself would fail or crawl in software.
        """
        peaks = dict(self.peak_flops_by_precision)
        if precision in peaks:
            return peaks[precision]
        if precision == "fp8":
            return peaks[self.default_precision]
        if precision in PRECISIONS:
            raise TitanPlanError(
                "T305",
                f"{self.name} has no {precision} on its matrix unit",
                f"use precision {' or '.join(name for name, _ in self.peak_flops_by_precision)}",
            )
        raise TitanPlanError("C611", f"unknown precision {precision!r}", f"one of {', '.join(PRECISIONS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier of links.

    kind `mesh`: a direct link between each pair of inner units, so a group of k uses k-1 links of each device.
    kind `switch`: each device has one port into a switch and every group gets the whole port.
    kind `bus`: a path between partners i and i + half (PCIe between two meshes).
    """

    name: str
    devices: int
    """Devices in one unit of this tier, counted with all inner tiers; 0 = no bound (outermost tier only)."""
    kind: str
    link_bandwidth_bytes_per_s: float
    """Nominal, per direction: of ONE link (mesh), of the device's port (switch), of the device's share (bus)."""
    efficiency: float
    """Reachable share of nominal for large messages."""
    latency_s: float
    """Alpha of one algorithm step, software included."""
    algorithms: tuple[str, ...]
    """What the collective library can run here, in its own names."""
    selection: str = "cheapest"
    """How the library picks when nothing is forced: `cheapest`, `power_of_two`, `power_of_two_or_8` (ascend.md 3.1)."""
    half_bandwidth_bytes: int = 0
    """Size of one message at which half the reachable bandwidth is reached; 0 = unknown, no penalty."""
    port: str = ""
    """Tiers with the same non-empty port drive one physical port of the device (A3: node and superpod)."""
    source: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse a tier that no wire could be."""
        _require(
            f"tier {self.name}",
            {
                f"kind in {TIER_KINDS} (got {self.kind!r})": self.kind in TIER_KINDS,
                f"devices >= 2 or 0 (got {self.devices})": self.devices == 0 or self.devices >= 2,
                "a mesh or bus has a bound": self.devices > 0 or self.kind == "switch",
                "bandwidth > 0": self.link_bandwidth_bytes_per_s > 0,
                f"0 < efficiency <= 1 (got {self.efficiency})": 0 < self.efficiency <= 1,
                "latency >= 0": self.latency_s >= 0,
                "half bandwidth size >= 0": self.half_bandwidth_bytes >= 0,
                "at least one algorithm": bool(self.algorithms),
                f"known selection (got {self.selection!r})": self.selection
                in ("cheapest", "power_of_two", "power_of_two_or_8"),
            },
        )

    @property
    def reachable_bandwidth_bytes_per_s(self) -> float:
        """Bandwidth of one link, port or path at large messages, per direction."""
        return self.link_bandwidth_bytes_per_s * self.efficiency

    @property
    def seconds_per_byte(self) -> float:
        """Beta of one link, port or path."""
        return 1.0 / self.reachable_bandwidth_bytes_per_s

    @property
    def step_latency_s(self) -> float:
        """Alpha of one step, with the ramp of the bandwidth.

        A utilisation of m / (m + half) makes m bytes take (m + half) * beta: the ramp is a longer alpha.
        """
        return self.latency_s + self.half_bandwidth_bytes * self.seconds_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster of equal devices under tiers of links, near to far."""

    name: str
    device: DeviceSpec
    tiers: tuple[TierSpec, ...]
    devices_per_node: int
    host_memory_bytes: int
    """Of one node."""
    collective_library: str
    communicator_buffer_bytes: int
    """Device memory that each communicator which runs a collective takes (HCCL: 2 x HCCL_BUFFSIZE)."""
    p2p_buffer_bytes: int
    """More of it for a communicator that sends and receives (HCCL: 2 x P2P_HCCL_BUFFSIZE)."""
    max_devices: int = 0
    """0 = no bound."""
    description: str = field(default="", compare=False)
    sources: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse tiers that do not nest."""
        sizes = [tier.devices for tier in self.tiers]
        bounded = [size for size in sizes if size]
        node = self.devices_per_node
        _require(
            f"cluster {self.name}",
            {
                "at least one tier": bool(sizes),
                "only the outermost tier is without bound": 0 not in sizes[:-1],
                f"each tier holds whole units of the one inside it ({sizes})": all(
                    outer > inner and outer % inner == 0 for inner, outer in itertools.pairwise(bounded)
                ),
                f"devices per node > 0 (got {node})": node > 0,
                f"tiers {sizes} and nodes of {node} nest": node > 0
                and all(size % node == 0 or node % size == 0 for size in bounded),
                "an outermost tier with a bound holds all devices": sizes[-1:] == [0]
                or 0 < self.max_devices <= max(sizes, default=0),
                f"library in {COLLECTIVE_LIBRARIES} (got {self.collective_library!r})": self.collective_library
                in COLLECTIVE_LIBRARIES,
                "host memory and buffers >= 0": min(
                    self.host_memory_bytes, self.communicator_buffer_bytes, self.p2p_buffer_bytes
                )
                >= 0,
            },
        )

    def __hash__(self) -> int:
        """Hash on a few telling fields: every cached collective hashes its cluster, and equality decides anyway."""
        return hash((self.name, self.device.name, self.devices_per_node, self.tiers[-1].link_bandwidth_bytes_per_s))

    def n_nodes(self, n_devices: int) -> int:
        """Return how many nodes these devices take; a part of a node counts as one."""
        return math.ceil(n_devices / self.devices_per_node)

    def check_devices(self, n_devices: int) -> None:
        """Raise unless a job can have this many devices: whole nodes, or a divisor of one node."""
        node = self.devices_per_node
        if n_devices <= 0:
            raise TitanPlanError("T301", f"{n_devices} devices is not a number of devices", f"e.g. {node}, one node")
        if self.max_devices and n_devices > self.max_devices:
            raise TitanPlanError(
                "T302",
                f"{self.name} has at most {self.max_devices} devices, {n_devices} were asked for",
                f"use {self.max_devices} or fewer, or another cluster",
            )
        if n_devices > node and n_devices % node:
            whole, left = divmod(n_devices, node)
            raise TitanPlanError(
                "T303",
                f"{n_devices} devices are not whole nodes: {whole} x {node} = {whole * node}, {left} left over",
                _nearest_hint(whole * node, (whole + 1) * node, self.max_devices),
            )
        if n_devices < node and node % n_devices:
            below, above = _nearest_divisors(node, n_devices)
            raise TitanPlanError(
                "T304",
                f"{n_devices} devices do not divide a node of {node}: {node} = {node // n_devices} x {n_devices} "
                f"+ {node % n_devices}",
                _nearest_hint(below, above, self.max_devices),
            )

    def with_inter_node_bandwidth(self, bytes_per_s: float) -> ClusterSpec:
        """Return a copy whose outermost tier has this nominal bandwidth per device and direction."""
        outer = self.tiers[-1]
        if outer.devices:
            raise TitanPlanError("T306", f"{self.name} has no network between nodes")
        return replace(self, tiers=(*self.tiers[:-1], replace(outer, link_bandwidth_bytes_per_s=bytes_per_s)))

    def with_devices_per_node(self, n_devices: int) -> ClusterSpec:
        """Return a copy with nodes of another size.

        Tiers inside the node that no longer fit go; tiers outside it are cut to whole nodes. A mesh does not grow: its
        links would have to be invented.
        """
        if n_devices <= 0:
            raise TitanPlanError("T301", f"{n_devices} devices per node is not a number of devices")
        old = self.devices_per_node
        tiers: list[TierSpec] = []
        for tier in self.tiers:
            size = _resized(tier, old, n_devices)
            nests = size == 0 or size % n_devices == 0 or (size > 1 and n_devices % size == 0)
            if size != 1 and nests and (not tiers or size != tiers[-1].devices):
                tiers.append(replace(tier, devices=size))
        max_devices = self.max_devices
        if tiers and tiers[-1].devices:
            max_devices = min(max_devices, tiers[-1].devices)
        return replace(self, tiers=tuple(tiers), devices_per_node=n_devices, max_devices=max_devices)


def _resized(tier: TierSpec, old_node: int, new_node: int) -> int:
    """Return how many devices the tier holds once nodes have another size."""
    if tier.devices > old_node:
        return max(tier.devices // new_node, 1) * new_node
    if tier.devices < old_node:
        return min(tier.devices, new_node)
    if tier.kind != "switch" and new_node > old_node:
        raise TitanPlanError(
            "T307",
            f"tier {tier.name} joins {old_node} devices by direct links and cannot hold {new_node}",
            "name the cluster that has such nodes, e.g. atlas-200t-a2-box16 for 16 devices",
        )
    return new_node


def _nearest_divisors(whole: int, n: int) -> tuple[int, int]:
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    return max(d for d in divisors if d < n), min(d for d in divisors if d > n)


def _nearest_hint(below: int, above: int, bound: int) -> str:
    return f"use {below}" if bound and above > bound else f"use {below} or {above}"
