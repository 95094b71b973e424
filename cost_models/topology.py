"""Which links a group of devices really has: the span of a communicator over the tiers, and the graph of the cluster.

Rank r is device r: devices are numbered so that a unit of a tier holds consecutive ranks. Placement decides which
dimension gets which stride before it comes here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cost_models.cluster import ClusterSpec, TierSpec
from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    import networkx as nx
    from numpy.typing import NDArray

Axes = tuple[tuple[int, int], ...]
"""(size, stride) pairs: the ranks of a group are base + sum(a_i * stride_i) with a_i in range(size_i)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpan:
    """Where the members of a communicator sit.

    `members_per_unit[i]` is how many members share one unit of tier i, for each tier near to far; the last is `size`.
    Where units hold unequal numbers it is their greatest common divisor, over all groups of the kind: equal blocks of
    that many members are what a hierarchical algorithm can use (HCCL itself falls back to a flat ring), and the
    slowest group of a step is the one that counts.
    """

    size: int
    members_per_unit: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse members that do not nest."""
        chain = (1, *self.members_per_unit)
        nested = all(outer % inner == 0 for inner, outer in itertools.pairwise(chain))
        if self.size < 1 or chain[-1] != self.size or not nested:
            raise TitanPlanError("T308", f"a group of {self.size} cannot have {self.members_per_unit} members per unit")

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many blocks of the tier inside each tier joins; 1 where the group does not use the tier."""
        chain = (1, *self.members_per_unit)
        return tuple(outer // inner for inner, outer in zip(chain, self.members_per_unit, strict=False))

    @property
    def outermost_tier(self) -> int:
        """Index of the farthest tier that the group uses; 0 for a group of one."""
        return max((tier for tier, count in enumerate(self.blocks) if count > 1), default=0)


@lru_cache(maxsize=65536)
def group_span(cluster: ClusterSpec, axes: Axes, n_devices: int = 0) -> GroupSpan:
    """Return the span of the groups with these axes, the worst one where they differ.

    The groups meant are all of the partition: every base whose digits at the axes are zero.

    Args:
        cluster: the cluster.
        axes: (size, stride) pairs of the group.
        n_devices: devices of the job. It matters only where groups straddle units: without it, groups that lie beyond
            the job's last device count as well.
    """
    kept = tuple(sorted((stride, size) for size, stride in axes if size != 1))
    digits = _digits(kept)
    size = math.prod(size for _, size in kept)
    units = tuple(0 if 0 < n_devices <= tier.devices else tier.devices for tier in cluster.tiers)
    members = tuple(_aligned_members(digits, unit) if unit else size for unit in units)
    if 0 in members:
        members = _counted_members(kept, units, n_devices)
    return GroupSpan(size=size, members_per_unit=(*members[:-1], size))


def _digits(axes: Axes) -> tuple[tuple[int, bool], ...]:
    """Write ranks in mixed radix: (radix, whether the group runs over this digit), near to far."""
    digits: list[tuple[int, bool]] = []
    extent = 1
    for stride, size in axes:
        if size < 1 or stride < extent or stride % extent:
            raise TitanPlanError("T308", f"(stride, size) pairs {axes} do not nest: {stride} after {extent} ranks")
        digits += [(stride // extent, False), (size, True)]
        extent = stride * size
    return tuple(digits)


def _aligned_members(digits: tuple[tuple[int, bool], ...], unit: int) -> int:
    """Return the members in one unit where its border falls between digits or cuts one evenly, else 0.

    All units then look alike, and nothing needs counting: the case of nearly every layout.
    """
    members, left = 1, unit
    for radix, of_group in digits:
        if left <= radix:
            return 0 if radix % left else members * (left if of_group else 1)
        if left % radix:
            return 0
        left //= radix
        members *= radix if of_group else 1
    return members


def _counted_members(axes: Axes, units: tuple[int, ...], n_devices: int) -> tuple[int, ...]:
    """Enumerate the groups until their pattern repeats against every unit, and count members unit by unit."""
    offsets = np.zeros(1, dtype=np.int64)
    for stride, size in axes:
        offsets = (offsets + stride * np.arange(size)[:, None]).ravel()
    stride, size = axes[-1]
    period = math.lcm(stride * size, *(unit for unit in units if unit))
    bases = np.arange(min(period, n_devices or period))
    for stride, size in axes:
        bases = bases[bases // stride % size == 0]
    ranks = bases[:, None] + offsets
    return tuple(_common_members(ranks // unit) if unit else offsets.size for unit in units)


def _common_members(unit_of_member: NDArray[np.int64]) -> int:
    """Return the greatest common divisor of how many members the units of each row (a group, ascending) hold.

    The divisor of the lengths of the runs is that of the positions where a run ends.
    """
    ends = np.flatnonzero((unit_of_member[:, 1:] != unit_of_member[:, :-1]).any(axis=0)) + 1
    return math.gcd(unit_of_member.shape[1], *ends.tolist())


def tier_bandwidth(cluster: ClusterSpec, span: GroupSpan, tier_index: int) -> float:
    """Return what one device reaches at this tier inside the group, bytes/s per direction; 0 if it is not used.

    Full mesh: a pair has ONE link and k blocks have k - 1 of each device's links (ascend.md 2). Switch and bus: the
    device's own port, which it shares with no other device, for each group of the partition has its own members.
    """
    tier = cluster.tiers[tier_index]
    blocks = span.blocks[tier_index]
    links = blocks - 1 if tier.kind == "mesh" or blocks == 1 else 1
    return links * tier.reachable_bandwidth_bytes_per_s


def build_graph(cluster: ClusterSpec, n_devices: int) -> nx.Graph[str]:
    """Return devices, switches and links.

    Nodes: `d<rank>` with attributes kind="device", rank, and `<tier>`=unit number for each tier; `<tier>:<unit>` with
    kind="switch". Edges: tier, bandwidth_bytes_per_s (nominal, per direction) and reachable_bytes_per_s.
    """
    import networkx as nx

    cluster.check_devices(n_devices)
    graph: nx.Graph[str] = nx.Graph(cluster=cluster.name)
    for rank in range(n_devices):
        graph.add_node(f"d{rank}", kind="device", rank=rank, **_unit_numbers(cluster, rank))
    inner: TierSpec | None = None
    for tier in cluster.tiers:
        for unit, ranks in enumerate(_units(tier, n_devices)):
            _join(graph, tier, inner, unit, ranks)
        inner = tier
    return graph


def _unit_numbers(cluster: ClusterSpec, rank: int) -> dict[str, int]:
    return {tier.name: rank // tier.devices if tier.devices else 0 for tier in cluster.tiers}


def _units(tier: TierSpec, n_devices: int) -> list[range]:
    size = tier.devices or n_devices
    return [range(start, min(start + size, n_devices)) for start in range(0, n_devices, size)]


def _join(graph: nx.Graph[str], tier: TierSpec, inner: TierSpec | None, unit: int, ranks: range) -> None:
    """Add the links of one unit of a tier."""
    block = inner.devices if inner else 1
    if len(ranks) <= block:
        return
    if tier.kind == "switch":
        _join_switch(graph, tier, inner, unit, ranks)
        return
    # Device i of one block meets device i of each other block: all pairs in a mesh of single devices, i with i + 8
    # where PCIe joins two meshes.
    for a in ranks:
        for b in range(a + block, ranks.stop, block):
            _link(graph, f"d{a}", f"d{b}", tier, 1)


def _join_switch(graph: nx.Graph[str], tier: TierSpec, inner: TierSpec | None, unit: int, ranks: range) -> None:
    switch = f"{tier.name}:{unit}"
    graph.add_node(switch, kind="switch", tier=tier.name)
    if inner is not None and inner.port and inner.port == tier.port:
        # One port per device: the inner switch carries its devices' traffic on, as broad as all their ports.
        for start in range(ranks.start, ranks.stop, inner.devices):
            width = min(inner.devices, ranks.stop - start)
            _link(graph, f"{inner.name}:{start // inner.devices}", switch, tier, width)
        return
    for rank in ranks:
        _link(graph, f"d{rank}", switch, tier, 1)


def _link(graph: nx.Graph[str], a: str, b: str, tier: TierSpec, width: int) -> None:
    graph.add_edge(
        a,
        b,
        tier=tier.name,
        bandwidth_bytes_per_s=width * tier.link_bandwidth_bytes_per_s,
        reachable_bytes_per_s=width * tier.reachable_bandwidth_bytes_per_s,
    )
