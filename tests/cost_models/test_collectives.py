"""Laws of collectives on real clusters, and the choices that HCCL and NCCL make."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.cluster import ClusterSpec
from cost_models.cluster_files import load_shipped_cluster
from cost_models.collectives import (
    KINDS,
    Line,
    algorithm_used,
    collective_lines,
    collective_time_s,
)
from cost_models.errors import TitanPlanError
from cost_models.topology import GroupSpan, build_graph, group_span

NAMES = [
    "atlas-800t-a2", "atlas-200t-a2-box16", "atlas-800-910a", "atlas-800t-a3", "atlas-a3-superpod", "dgx-h100",
    "gb200-nvl72", "v100-32g", "local",
]  # fmt: skip
A2 = load_shipped_cluster("atlas-800t-a2")
SUPERPOD = load_shipped_cluster("atlas-a3-superpod")
SIZES = [1.0, 1e3, 1e5, 1e6, 1e7, 1e8, 1e10]
Axes = tuple[tuple[int, int], ...]


@st.composite
def clusters_and_axes(draw: st.DrawFn) -> tuple[ClusterSpec, Axes]:
    cluster = load_shipped_cluster(draw(st.sampled_from(NAMES)))
    bound = cluster.max_devices or 4096
    size = draw(st.sampled_from([2, 3, 4, 6, 8, 16, 48, 64, 128]).filter(lambda size: size <= bound))
    stride = draw(st.sampled_from([1, 2, 4, 8, 16, 64, 768]).filter(lambda stride: stride * size <= bound * 32))
    if cluster.max_devices:
        stride = 1
    return cluster, ((size, stride),)


def time_s(kind: str, cluster: ClusterSpec, axes: Axes, n_bytes: float, algorithm: str = "auto") -> float:
    return collective_time_s(collective_lines(kind, group_span(cluster, axes), cluster, algorithm), n_bytes)


def crosses_servers_redundantly(cluster: ClusterSpec, span: GroupSpan) -> bool:
    """HCCL's order on A2 and 910A: all-gather across last, with whole servers' bytes (ascend.md 3.1)."""
    in_node = [index for index, tier in enumerate(cluster.tiers) if 0 < tier.devices <= cluster.devices_per_node]
    if cluster.collective_library != "hccl" or not in_node:
        return False
    has_switch = any(cluster.tiers[index].kind == "switch" for index in in_node)
    members = span.members_per_unit[in_node[-1]]
    return not has_switch and 1 < members < span.size


@settings(max_examples=200, deadline=None)
@given(clusters_and_axes(), st.data())
def test_doubling_any_link_never_slows_a_collective(case: tuple[ClusterSpec, Axes], data: st.DataObject) -> None:
    cluster, axes = case
    index = data.draw(st.integers(0, len(cluster.tiers) - 1))
    kind = data.draw(st.sampled_from(KINDS))
    n_bytes = data.draw(st.sampled_from(SIZES))
    tier = cluster.tiers[index]
    faster = replace(tier, link_bandwidth_bytes_per_s=2 * tier.link_bandwidth_bytes_per_s)
    better = replace(cluster, tiers=(*cluster.tiers[:index], faster, *cluster.tiers[index + 1 :]))
    assert time_s(kind, better, axes, n_bytes) <= time_s(kind, cluster, axes, n_bytes) * (1 + 1e-12)


@settings(max_examples=200, deadline=None)
@given(clusters_and_axes(), st.sampled_from(KINDS), st.sampled_from(SIZES), st.floats(1.0, 100.0))
def test_more_bytes_never_take_less_time(
    case: tuple[ClusterSpec, Axes], kind: str, n_bytes: float, factor: float
) -> None:
    cluster, axes = case
    assert 0 < time_s(kind, cluster, axes, n_bytes) <= time_s(kind, cluster, axes, n_bytes * factor)


@settings(max_examples=200, deadline=None)
@given(clusters_and_axes(), st.sampled_from(SIZES))
def test_an_all_reduce_takes_at_least_an_all_gather(case: tuple[ClusterSpec, Axes], n_bytes: float) -> None:
    cluster, axes = case
    if crosses_servers_redundantly(cluster, group_span(cluster, axes)):
        return
    # NCCL's tree, which only all-reduce has, takes fewer steps than the ring of an all-gather.
    algorithm = "ring" if cluster.collective_library == "nccl" else "auto"
    gather = time_s("all_gather", cluster, axes, n_bytes, algorithm)
    assert time_s("all_reduce", cluster, axes, n_bytes, algorithm) >= gather
    assert time_s("reduce_scatter", cluster, axes, n_bytes, algorithm) == pytest.approx(gather)


def bytes_into(kind: str, inside: int, size: int) -> float:
    """Least bytes that must enter a part of the group, for each byte of the collective, by counting."""
    outside = size - inside
    return {
        "all_gather": outside / size,
        # Each piece that a member keeps needs at least one partial sum from outside.
        "reduce_scatter": inside / size,
        # Each element of the result needs something from outside.
        "all_reduce": 1.0,
        "all_to_all": inside * outside / size,
    }[kind]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("axes", [((2, 1),), ((4, 1),), ((4, 2),), ((8, 1),), ((16, 1),), ((4, 16),), ((32, 1),)])
@pytest.mark.parametrize("name", NAMES)
def test_no_line_beats_the_links_of_the_graph(name: str, axes: Axes, kind: str) -> None:
    cluster = load_shipped_cluster(name)
    ((size, stride),) = axes
    if cluster.max_devices and size * stride > cluster.max_devices:
        return
    whole = -(-size * stride // cluster.devices_per_node) * cluster.devices_per_node
    graph = build_graph(cluster, whole)
    members = [f"d{rank * stride}" for rank in range(size)]
    switches = [node for node, data in graph.nodes(data=True) if data["kind"] == "switch"]
    wiring = nx.DiGraph(graph.subgraph([*members, *switches]))
    wiring.add_edges_from([("outside", member) for member in members])
    wiring.add_edges_from([(member, "inside") for member in members])
    slowest = min(line.seconds_per_byte for line in collective_lines(kind, group_span(cluster, axes), cluster))
    parts = {1, *(tier.devices // stride for tier in cluster.tiers)}
    for part in (part for part in parts if 0 < part < size):
        cut = wiring.copy()
        cut.remove_edges_from([("outside", member) for member in members[:part]])
        cut.remove_edges_from([(member, "inside") for member in members[part:]])
        capacity = nx.maximum_flow_value(cut, "outside", "inside", capacity="reachable_bytes_per_s")
        assert slowest >= bytes_into(kind, part, size) / capacity * (1 - 1e-9), part


def test_tp_2_on_the_mesh_has_one_link_and_tp_8_seven_times_that() -> None:
    """What each device receives a second in a large all-gather."""
    rate = {}
    for size in (2, 8):
        (line,) = collective_lines("all_gather", group_span(A2, ((size, 1),)), A2)
        rate[size] = (size - 1) / size / line.seconds_per_byte
    assert rate[2] == pytest.approx(28e9 * 0.654)
    assert rate[8] == pytest.approx(7 * rate[2])


def test_a_message_in_the_mesh_has_one_link_and_ramps_up() -> None:
    cluster = replace(A2, tiers=(replace(A2.tiers[0], latency_s=0.0), A2.tiers[1]))
    lines = collective_lines("send_recv", group_span(cluster, ((8, 1),)), cluster)
    half = cluster.tiers[0].half_bandwidth_bytes
    assert half / collective_time_s(lines, float(half)) == pytest.approx(28e9 * 0.654 / 2)
    assert 1e12 / collective_time_s(lines, 1e12) == pytest.approx(28e9 * 0.654, rel=1e-5)


def test_an_h100_node_shows_the_bus_bandwidth_that_nccl_tests_print() -> None:
    lines = collective_lines(
        "all_reduce", group_span(load_shipped_cluster("dgx-h100"), ((8, 1),)), load_shipped_cluster("dgx-h100")
    )
    n_bytes = 8e9
    assert 2 * 7 / 8 * n_bytes / collective_time_s(lines, n_bytes) == pytest.approx(370e9, rel=0.02)


def test_910b_all_reduce_at_64_mib_by_hand() -> None:
    """2 (10 us + 190 KiB / 18.312 GB/s) + 2 * 64 MiB / 8 / 18.312 GB/s."""
    expected = 2 * (10e-6 + 194560 / 18.312e9) + 2 * 67108864 / 8 / 18.312e9
    assert time_s("all_reduce", A2, ((8, 1),), 67108864.0) == pytest.approx(expected)


def test_the_neighbours_of_a_pipeline_pay_for_their_farthest_hop() -> None:
    assert time_s("send_recv", A2, ((4, 4),), 1e8) == time_s("send_recv", A2, ((4, 8),), 1e8)
    assert time_s("send_recv", A2, ((2, 4),), 1e5) < time_s("send_recv", A2, ((4, 4),), 1e5)


@pytest.mark.parametrize(("servers", "algorithm"), [(2, "H-D_R"), (3, "ring"), (4, "H-D_R"), (6, "ring"), (12, "ring")])
def test_910a_takes_halving_doubling_for_powers_of_two_only(servers: int, algorithm: str) -> None:
    cluster = load_shipped_cluster("atlas-800-910a")
    lines = collective_lines("all_reduce", group_span(cluster, ((servers, 8),)), cluster)
    assert [line.algorithm for line in lines] == [algorithm]


@pytest.mark.parametrize(("pods", "algorithm"), [(2, "H-D_R"), (3, "ring"), (7, "ring"), (8, "H-D_R"), (9, "H-D_R")])
def test_between_superpods_eight_or_more_always_halve(pods: int, algorithm: str) -> None:
    lines = collective_lines("all_reduce", group_span(SUPERPOD, ((pods, 768),)), SUPERPOD)
    assert [line.algorithm for line in lines] == [algorithm]


def test_large_all_gathers_between_910b_servers_run_as_pipeline() -> None:
    lines = collective_lines("all_gather", group_span(A2, ((64, 1),)), A2)
    assert algorithm_used(lines, 1e9) == "mesh + pipeline"


def test_without_pipeline_an_all_gather_carries_whole_servers_over_each_port() -> None:
    """16 devices, 2 servers: ring across 1/2 n / 20 GB/s after mesh inside n/2 / 8 / 18.312 GB/s (HCCL's order)."""
    (line,) = collective_lines("all_gather", group_span(A2, ((16, 1),)), A2, "NHR")
    assert line.algorithm == "mesh + NHR"
    assert line.seconds_per_byte == pytest.approx(0.5 / 20e9 + 0.5 / 8 / 18.312e9)


def test_a3_nests_all_gathers_and_sends_each_byte_once() -> None:
    """32 dies: SIO n/2 at 204, node 7/8 n/2 and superpod 1/2 n/16, at 137.2 and 133.28 GB/s."""
    lines = collective_lines("all_gather", group_span(SUPERPOD, ((32, 1),)), SUPERPOD)
    expected = 1 / 2 / 204e9 + 7 / 8 / 2 / 137.2e9 + 1 / 2 / 16 / 133.28e9
    assert lines[-1].algorithm == "mesh + ring + ring"
    assert lines[-1].seconds_per_byte == pytest.approx(expected)


def test_an_all_to_all_on_a3_shares_the_port_between_node_and_superpod() -> None:
    """32 dies: 14/32 of the bytes stay in the node, 16/32 leave it, all of them over the die's one UB port."""
    (line,) = collective_lines("all_to_all", group_span(SUPERPOD, ((32, 1),)), SUPERPOD)
    assert line.seconds_per_byte == pytest.approx(14 / 32 / 137.2e9 + 16 / 32 / 133.28e9)


def test_gpus_of_a_node_drive_all_its_network_ports_in_one_ring() -> None:
    """16 H100: 8 ports of 45 GB/s carry 360, a little less than NVLink's 369."""
    cluster = load_shipped_cluster("dgx-h100")
    lines = collective_lines("all_gather", group_span(cluster, ((16, 1),)), cluster)
    assert lines[-1] == Line("ring", lines[-1].alpha_s, pytest.approx(15 / 16 / 360e9))


def test_short_messages_between_gpus_pay_each_hop_by_its_tier() -> None:
    """16 H100, short protocol. Ring: 14 hops of 1.5 us, 2 of 8 us, 15 of 16 taken. Tree: chain of 7, 1 level, twice."""
    cluster = load_shipped_cluster("dgx-h100")
    span = group_span(cluster, ((16, 1),))
    assert collective_lines("all_gather", span, cluster)[0].alpha_s == pytest.approx(15 / 16 * (14 * 1.5e-6 + 2 * 8e-6))
    assert collective_lines("all_reduce", span, cluster)[0].alpha_s == pytest.approx(2 * (7 * 1.5e-6 + 8e-6))


@pytest.mark.parametrize("name", ["NHR", "nhr", "NB", "ring", "AHC", "h-d_r", "pipeline"])
def test_a_forced_algorithm_is_the_only_one(name: str) -> None:
    lines = collective_lines("all_reduce", group_span(A2, ((64, 1),)), A2, name)
    assert [line.algorithm.split(" + ")[-1].lower() for line in lines] == [name.lower()]


@pytest.mark.parametrize(
    ("cluster", "name", "known"),
    [(A2, "tree", "NHR"), (SUPERPOD, "pipeline", "H-D_R"), (load_shipped_cluster("dgx-h100"), "NHR", "tree")],
)
def test_a_name_that_the_library_does_not_have_is_refused(cluster: ClusterSpec, name: str, known: str) -> None:
    with pytest.raises(TitanPlanError) as caught:
        collective_lines("all_reduce", group_span(cluster, ((64, 1),)), cluster, name)
    assert caught.value.code == "T309"
    assert known in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "axes", "name"),
    [
        ("all_reduce", ((8, 8),), "pipeline"),
        ("broadcast", ((16, 1),), "pipeline"),
        ("all_reduce", ((16, 1),), "pairwise"),
        ("all_gather", ((16, 1),), "AHC"),
        ("all_reduce", ((8, 1),), "NHR"),
    ],
)
def test_where_a_forced_algorithm_cannot_run_the_library_chooses(kind: str, axes: Axes, name: str) -> None:
    span = group_span(A2, axes)
    assert collective_lines(kind, span, A2, name) == collective_lines(kind, span, A2)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(TitanPlanError, match="gossip"):
        collective_lines("gossip", group_span(A2, ((2, 1),)), A2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_and_no_bytes_cost_nothing(kind: str) -> None:
    alone = collective_lines(kind, group_span(A2, ((1, 1),)), A2)
    assert alone == ()
    assert collective_time_s(alone, 1e9) == 0.0
    assert algorithm_used(alone, 1e9) == "none"
    assert collective_time_s(collective_lines(kind, group_span(A2, ((8, 1),)), A2), 0) == 0.0


def test_arrays_give_the_same_times_as_numbers() -> None:
    lines = (Line("quick", 1e-6, 2e-9), Line("broad", 1e-3, 1e-10))
    sizes = np.array([0, 10, 1000, 10**6, 10**9])
    by_hand = [0.0, 1e-6 + 2e-8, 1e-6 + 2e-6, 1e-3 + 1e-4, 1e-3 + 0.1]
    assert collective_time_s(lines, sizes) == pytest.approx(by_hand)
    assert [collective_time_s(lines, float(size)) for size in sizes] == pytest.approx(by_hand)
    assert collective_time_s((), sizes).tolist() == [0.0] * 5
    assert [algorithm_used(lines, size) for size in (10.0, 1e9)] == ["quick", "broad"]
