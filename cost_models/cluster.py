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
from cost_models.yaml_numbers import COUNT, Range, check_name, plain, shorten

VENDORS: Final = ("ascend", "nvidia", "cpu")
TIER_KINDS: Final = ("mesh", "switch", "bus")
COLLECTIVE_LIBRARIES: Final = ("hccl", "nccl", "gloo")
PRECISIONS: Final = ("bf16", "fp16", "fp32", "fp8")


SELECTIONS: Final = ("cheapest", "power_of_two", "power_of_two_or_8")

BYTES: Final = Range(0, 10**18)
FLOPS: Final = Range(1, 1e21)
BANDWIDTH: Final = Range(1, 1e16)
"""Below a byte a second, a bandwidth is a slip of the unit, and times would leave what floats hold."""
HOST_BANDWIDTH: Final = Range(1, 1e16, or_zero=True)
EFFICIENCY: Final = Range(1e-6, 1)
LATENCY: Final = Range(0, 1000)
SIZE: Final = Range(1, 10**9)


def _require(owner: str, checks: dict[str, tuple[bool, str]]) -> None:
    """Raise at the first check that does not hold; each is what was got, whether that is right, and what would be."""
    for got, (holds, right) in checks.items():
        if not holds:
            raise TitanPlanError("C610", f"{owner}: {got}", right)


def _in_ranges(spec: object, ranges: dict[str, Range]) -> dict[str, tuple[bool, str]]:
    values = {name: getattr(spec, name) for name in ranges}
    return {
        f"{name} is {shorten(value)}": (ranges[name].holds(value), f"{ranges[name].tell()} is needed")
        for name, value in values.items()
    }


def _one_of(name: str, value: str, options: tuple[str, ...]) -> dict[str, tuple[bool, str]]:
    return {f"{name} is {shorten(value)}": (value in options, f"one of {', '.join(options)} is needed")}


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
        peaks = dict(self.peak_flops_by_precision)
        names = ", ".join(PRECISIONS)
        odd = next((name for name in peaks if name not in PRECISIONS), "")
        _require(
            f"device {plain(self.name)}",
            {
                **_one_of("vendor", self.vendor, VENDORS),
                f"there is no precision {shorten(odd)}": (not odd, f"peaks are given for {names}"),
                "the fp32 peak is missing": ("fp32" in peaks, "give the dense matrix peak of fp32 too"),
                **{
                    f"the {name} peak is {shorten(value)} FLOP/s": (FLOPS.holds(value), f"{FLOPS.tell()} is needed")
                    for name, value in peaks.items()
                },
                **_in_ranges(
                    self,
                    {
                        "vector_flops": FLOPS,
                        "memory_bytes": BYTES,
                        "usable_memory_bytes": BYTES,
                        "memory_bandwidth_bytes_per_s": BANDWIDTH,
                        "cores": SIZE,
                        "gemm_tile_m": SIZE,
                        "gemm_tile_n": SIZE,
                        "l2_bytes": BYTES,
                        "host_bandwidth_bytes_per_s": HOST_BANDWIDTH,
                        "context_bytes": BYTES,
                    },
                ),
                f"usable memory is {self.usable_memory_bytes} of {self.memory_bytes} bytes": (
                    0 < self.usable_memory_bytes <= self.memory_bytes,
                    "usable memory is above 0 and at most the memory",
                ),
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
        check_name(self.name, "name of a tier")
        _require(
            f"tier {plain(self.name)}",
            {
                **_one_of("kind", self.kind, TIER_KINDS),
                f"devices is {shorten(self.devices)}": (
                    COUNT.holds(self.devices) and self.devices != 1,
                    f"{Range(2, COUNT.most, or_zero=True).tell(kind='a whole number')} (no bound) is needed",
                ),
                f"a {self.kind} without bound": (
                    self.devices > 0 or self.kind == "switch",
                    "give a mesh or a bus the number of its devices",
                ),
                **_in_ranges(
                    self,
                    {
                        "link_bandwidth_bytes_per_s": BANDWIDTH,
                        "efficiency": EFFICIENCY,
                        "latency_s": LATENCY,
                        "half_bandwidth_bytes": BYTES,
                    },
                ),
                "no algorithm": (bool(self.algorithms), "name at least one, such as ring"),
                **_one_of("selection", self.selection, SELECTIONS),
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
        check_name(self.name, "name of a cluster")
        _require(
            f"cluster {plain(self.name)}",
            {
                "no tier": (bool(sizes), "give at least one tier of links"),
                f"tiers hold {shorten(sizes)} devices, an inner one without bound": (
                    0 not in sizes[:-1],
                    "only the outermost tier may be without bound (devices: 0)",
                ),
                f"tiers hold {shorten(sizes)} devices": (
                    all(outer > inner and outer % inner == 0 for inner, outer in itertools.pairwise(bounded)),
                    "each tier holds whole units of the one inside it, such as 2, 16, 768",
                ),
                **_in_ranges(self, {"devices_per_node": SIZE, "max_devices": COUNT}),
                f"nodes of {node} devices and tiers of {shorten(sizes)} do not nest": (
                    node > 0 and all(size % node == 0 or node % size == 0 for size in bounded),
                    "a tier holds whole nodes, or a node holds whole units of the tier",
                ),
                f"max_devices is {self.max_devices}, the outermost tier holds {max(sizes, default=0)}": (
                    sizes[-1:] == [0] or 0 < self.max_devices <= max(sizes, default=0),
                    "with a bounded outermost tier, max_devices is from 1 to what that tier holds",
                ),
                **_one_of("collective_library", self.collective_library, COLLECTIVE_LIBRARIES),
                **_in_ranges(
                    self,
                    {
                        "host_memory_bytes": BYTES,
                        "communicator_buffer_bytes": BYTES,
                        "p2p_buffer_bytes": BYTES,
                    },
                ),
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
            raise TitanPlanError("T306", f"{self.name} has no network between nodes", "take a cluster with a switch")
        return replace(self, tiers=(*self.tiers[:-1], replace(outer, link_bandwidth_bytes_per_s=bytes_per_s)))

    def with_devices_per_node(self, n_devices: int) -> ClusterSpec:
        """Return a copy with nodes of another size.

        Tiers inside the node that no longer fit go; tiers outside it are cut to whole nodes. A mesh does not grow: its
        links would have to be invented.
        """
        if n_devices <= 0:
            raise TitanPlanError("T301", f"{n_devices} devices per node is not a number of devices", "e.g. 8")
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
    small = [d for d in range(1, math.isqrt(whole) + 1) if whole % d == 0]
    divisors = [*small, *(whole // d for d in small)]
    return max(d for d in divisors if d < n), min(d for d in divisors if d > n)


def _nearest_hint(below: int, above: int, bound: int) -> str:
    return f"use {below}" if bound and above > bound else f"use {below} or {above}"
