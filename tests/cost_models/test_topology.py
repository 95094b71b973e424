"""The graph is the wiring of the documents, and spans agree with counting on it."""

from __future__ import annotations

import math
from collections import Counter

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.cluster import ClusterSpec
from cost_models.cluster_files import load_shipped_cluster
from cost_models.errors import TitanPlanError
from cost_models.topology import GroupSpan, build_graph, group_span, tier_bandwidth

NAMES = ["atlas-800t-a2", "atlas-200t-a2-box16", "atlas-800-910a", "atlas-a3-superpod", "dgx-h100", "gb200-nvl72"]


def links(graph: nx.Graph, tier: str) -> list[tuple[str, str]]:
    return [(a, b) for a, b, data in graph.edges(data=True) if data["tier"] == tier]


def groups_of(degrees: list[int], inside: list[bool]) -> np.ndarray:
    """All groups over the chosen dimensions, one a row; the first degree is the nearest."""
    ranks = np.arange(math.prod(degrees)).reshape(degrees[::-1])
    chosen = [axis for axis, of_group in enumerate(inside[::-1]) if of_group]
    moved = np.moveaxis(ranks, chosen, range(-len(chosen), 0))
    return moved.reshape(-1, math.prod(degree for degree, of in zip(degrees, inside, strict=True) if of))


def axes_of(degrees: list[int], inside: list[bool]) -> tuple[tuple[int, int], ...]:
    strides = [math.prod(degrees[:index]) for index in range(len(degrees))]
    return tuple((degree, stride) for degree, stride, of in zip(degrees, strides, inside, strict=True) if of)


def counted_span(graph: nx.Graph, cluster: ClusterSpec, groups: np.ndarray) -> tuple[int, ...]:
    """Common divisor of the members per unit, read from the unit numbers on the graph's nodes."""
    members = []
    for tier in cluster.tiers:
        common = 0
        for group in groups:
            units = Counter(graph.nodes[f"d{rank}"][tier.name] for rank in group)
            common = math.gcd(common, *units.values())
        members.append(common)
    return tuple(members)


def test_a_910b_pair_has_exactly_one_link_and_a_device_has_seven() -> None:
    cluster = load_shipped_cluster("atlas-800t-a2")
    graph = build_graph(cluster, 16)
    assert len(links(graph, "mesh")) == 2 * 8 * 7 // 2
    for rank in range(16):
        near = [edge for edge in graph.edges(f"d{rank}", data=True) if edge[2]["tier"] == "mesh"]
        assert len(near) == 7
        assert sum(edge[2]["bandwidth_bytes_per_s"] for edge in near) == 196e9
    assert not graph.has_edge("d7", "d8")


def test_box16_joins_each_device_to_its_partner_in_the_other_mesh() -> None:
    graph = build_graph(load_shipped_cluster("atlas-200t-a2-box16"), 32)
    pairs = {frozenset(edge) for edge in links(graph, "pcie")}
    expected = {frozenset((f"d{i}", f"d{i + 8}")) for box in (0, 16) for i in range(box, box + 8)}
    assert pairs == expected


def test_a_superpod_carries_a_nodes_whole_bandwidth_between_nodes() -> None:
    graph = build_graph(load_shipped_cluster("atlas-a3-superpod"), 48)
    assert graph.edges["node:1", "superpod:0"]["bandwidth_bytes_per_s"] == 16 * 196e9
    assert not graph.has_edge("d0", "superpod:0")
    assert graph.has_edge("d0", "d1")
    assert not graph.has_edge("d1", "d2")


def test_every_device_reaches_every_other() -> None:
    for name in NAMES:
        assert nx.is_connected(build_graph(load_shipped_cluster(name), 64))


def test_a_single_node_has_no_network() -> None:
    graph = build_graph(load_shipped_cluster("atlas-800t-a2"), 8)
    assert not links(graph, "roce")
    assert "roce:0" not in graph


@pytest.mark.parametrize(
    ("name", "axes", "members"),
    [
        ("atlas-800t-a2", ((8, 1),), (8, 8)),
        ("atlas-800t-a2", ((2, 4),), (2, 2)),
        ("atlas-800t-a2", ((4, 4),), (2, 4)),
        ("atlas-800t-a2", ((16, 8),), (1, 16)),
        ("atlas-800t-a2", ((2, 2), (4, 16)), (2, 8)),
        ("atlas-800t-a2", ((3, 2),), (1, 3)),
        ("atlas-200t-a2-box16", ((8, 2),), (4, 8, 8)),
        ("atlas-a3-superpod", ((32, 2),), (1, 8, 32, 32)),
        ("atlas-a3-superpod", ((2, 768),), (1, 1, 1, 2)),
        ("atlas-a3-superpod", (), (1, 1, 1, 1)),
    ],
)
def test_spans_counted_by_hand(name: str, axes: tuple[tuple[int, int], ...], members: tuple[int, ...]) -> None:
    span = group_span(load_shipped_cluster(name), axes)
    assert span.members_per_unit == members


def test_a_straddling_group_counts_as_the_worst_of_its_kind() -> None:
    """dp=3 over tp=2: ranks 0 2 4 share a node, 6 | 8 10 do not."""
    cluster = load_shipped_cluster("atlas-800t-a2")
    assert group_span(cluster, ((3, 2),), 24).members_per_unit == (1, 3)
    superpod = load_shipped_cluster("atlas-a3-superpod")
    assert group_span(superpod, ((9, 16),), 144).members_per_unit == (1, 1, 9, 9)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_spans_agree_with_counting_on_the_graph(data: st.DataObject) -> None:
    cluster = load_shipped_cluster(data.draw(st.sampled_from(NAMES)))
    degrees = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    left = math.prod(degrees)
    degrees.append(math.lcm(left, cluster.devices_per_node) // left)
    inside = data.draw(st.lists(st.booleans(), min_size=len(degrees), max_size=len(degrees)))
    n_devices = math.prod(degrees)
    if n_devices > 400 or not any(inside):
        return
    groups = groups_of(degrees, inside)
    span = group_span(cluster, axes_of(degrees, inside), n_devices)
    assert span.size == groups.shape[1]
    assert span.members_per_unit == counted_span(build_graph(cluster, n_devices), cluster, groups)


@pytest.mark.parametrize("axes", [((0, 1),), ((2, 0),), ((4, 1), (2, 2)), ((4, 1), (2, 6))])
def test_axes_that_do_not_nest_are_refused(axes: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(TitanPlanError) as caught:
        group_span(load_shipped_cluster("atlas-800t-a2"), axes)
    assert caught.value.code == "T308"


@pytest.mark.parametrize(("size", "members"), [(4, (3, 4)), (4, (2, 8)), (0, (0,)), (4, (8, 4))])
def test_members_that_do_not_nest_are_refused(size: int, members: tuple[int, ...]) -> None:
    with pytest.raises(TitanPlanError):
        GroupSpan(size=size, members_per_unit=members)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_group_in_a_mesh_has_the_links_between_its_members(size: int) -> None:
    cluster = load_shipped_cluster("atlas-800t-a2")
    graph = build_graph(cluster, 8)
    between = graph.subgraph(f"d{rank}" for rank in range(size)).edges("d0", data=True)
    reachable = sum(data["reachable_bytes_per_s"] for _, _, data in between)
    got = tier_bandwidth(cluster, group_span(cluster, ((size, 1),)), 0)
    assert got == pytest.approx(reachable)
    assert got == pytest.approx((size - 1) * 18.3e9, rel=0.01)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_switch_gives_every_group_the_whole_port(size: int) -> None:
    cluster = load_shipped_cluster("dgx-h100")
    assert tier_bandwidth(cluster, group_span(cluster, ((size, 1),)), 0) == pytest.approx(369e9)


def test_a_tier_that_the_group_does_not_use_gives_nothing() -> None:
    cluster = load_shipped_cluster("atlas-800t-a2")
    across = group_span(cluster, ((4, 8),))
    assert tier_bandwidth(cluster, across, 0) == 0
    assert tier_bandwidth(cluster, across, 1) == pytest.approx(20e9)
