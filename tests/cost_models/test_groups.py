"""Groups against an array of all ranks, cut along the dimensions of the placement; collectives against the links."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cost_models.catalog import find_cluster
from cost_models.cluster import ClusterSpec
from cost_models.groups import Axes, CollectiveClock, Groups
from cost_models.layout import PLACEMENTS, Layout, Layouts
from cost_models.parameters import expert_shard_degree, shard_degree

Ranks = NDArray[np.int64]
degrees = st.sampled_from([1, 2, 3, 4, 6])
outer_degrees = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any degrees, shards that divide dp, and experts that take tp, cp and dp ranks from the inside out."""
    tp, cp, pp = draw(degrees), draw(st.sampled_from([1, 2, 4])), draw(degrees)
    shard, replicas = draw(outer_degrees), draw(outer_degrees)
    zero = draw(st.integers(0, 3))
    inside = draw(st.sampled_from([d for d in range(1, tp + 1) if tp % d == 0]))
    across = draw(st.sampled_from([d for d in (1, 2, 4) if cp % d == 0])) if inside == tp else 1
    beyond = draw(st.sampled_from([d for d in (1, 2, 4) if shard % d == 0])) if across == cp and inside == tp else 1
    return Layout(
        tp=tp,
        sp=tp > 1,
        cp=cp,
        pp=pp,
        dp=shard * replicas,
        zero=zero,
        dp_shard=shard if zero else 1,
        ep=inside * across * beyond,
        placement=draw(st.sampled_from(PLACEMENTS)),
    )


def all_ranks(layout: Layout) -> Ranks:
    """Ranks by index [pp, dp, cp, tp], numbered in the order of the placement, the near dimension fastest."""
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp")}
    far_to_near = layout.placement.split("-")[::-1]
    ranks = np.arange(layout.devices).reshape([sizes[name] for name in far_to_near])
    return ranks.transpose([far_to_near.index(name) for name in ("pp", "dp", "cp", "tp")])


def rows(ranks: Ranks, *, along: tuple[int, ...]) -> Ranks:
    """One group a row: all ranks whose other indices are equal."""
    rest = tuple(axis for axis in range(ranks.ndim) if axis not in along)
    return ranks.transpose((*rest, *along)).reshape(-1, prod(ranks.shape[axis] for axis in along))


def expected_groups(x: Layout) -> dict[str, Ranks]:
    """What each dimension means, in terms of the array of ranks."""
    ranks = all_ranks(x)
    pp, dp, cp, tp = range(4)
    n_shards = x.dp_shard if x.zero else 1
    blocks = ranks.reshape(x.pp, x.dp // n_shards, n_shards, x.cp, x.tp)
    groups = {
        "tp": rows(ranks, along=(tp,)),
        "cp": rows(ranks, along=(cp,)),
        "pp": rows(ranks, along=(pp,)),
        "data": rows(ranks, along=(dp, cp)),
        "world": ranks.reshape(1, -1),
        "shard": rows(blocks, along=(2, 3)) if x.zero else ranks.reshape(-1, 1),
        "replica": rows(blocks, along=(1,)) if x.zero else rows(ranks, along=(dp, cp)),
        "ep": ranks.reshape(x.pp, -1, x.ep).reshape(-1, x.ep),
    }
    if x.ep == 1:
        # Experts are then cut by tp as the dense layers are.
        return groups | {"expert_shard": groups["shard"], "expert_replica": groups["replica"]}
    # Within a block of shards, [copies, ep]: a column holds the same experts.
    n_blocks = x.dp // n_shards if x.zero else 1
    columns = ranks.reshape(x.pp, n_blocks, -1, x.ep)
    if x.zero:
        return groups | {"expert_shard": rows(columns, along=(2,)), "expert_replica": rows(columns, along=(1,))}
    return groups | {"expert_shard": ranks.reshape(-1, 1), "expert_replica": rows(columns, along=(2,))}


def axes_of(x: Layout, name: str) -> list[tuple[int, int]]:
    axes: Axes = getattr(Groups.of(Layouts.of([x])), name)
    return [(int(np.asarray(size).item()), int(np.asarray(stride).item())) for size, stride in axes]


def offsets(axes: list[tuple[int, int]]) -> list[int]:
    found = [0]
    for size, stride in axes:
        found = [old + step * stride for step in range(size) for old in found]
    return sorted(found)


NAMES = ("tp", "cp", "ep", "pp", "shard", "replica", "data", "expert_shard", "expert_replica", "world")


@pytest.mark.parametrize("name", NAMES)
@given(layout=layouts())
@settings(max_examples=60, deadline=None)
def test_axes_give_the_ranks_of_every_group(name: str, layout: Layout) -> None:
    expected = expected_groups(layout)[name]
    assert sorted(expected.ravel().tolist()) == list(range(layout.devices))
    steps = offsets(axes_of(layout, name))
    for group in expected.tolist():
        assert sorted(group) == [min(group) + step for step in steps]


@given(layout=layouts())
@settings(max_examples=100, deadline=None)
def test_shard_degrees_are_the_sizes_of_the_shard_groups(layout: Layout) -> None:
    columns = Layouts.of([layout])
    for degree, name in ((shard_degree(columns), "shard"), (expert_shard_degree(columns), "expert_shard")):
        assert degree.item() == prod(size for size, _ in axes_of(layout, name))


@given(layout=layouts())
@settings(max_examples=100, deadline=None)
def test_shards_and_replicas_together_are_all_ranks_with_the_same_weights(layout: Layout) -> None:
    sizes = {name: prod(size for size, _ in axes_of(layout, name)) for name in NAMES}
    assert sizes["shard"] * sizes["replica"] == sizes["data"] == layout.dp * layout.cp
    experts = sizes["expert_shard"] * sizes["expert_replica"]
    assert experts == (layout.dp * layout.cp * layout.tp // layout.ep if layout.ep > 1 else layout.dp * layout.cp)


# --- the clock: no collective beats the links ---

CLUSTERS = ("atlas-800t-a2", "cloudmatrix384", "atlas-800-910a", "dgx-h100", "local")
RECEIVED = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "all_reduce": 2.0}
"""Share of (p - 1) / p of the bytes that each rank has to receive at least (all-reduce: Patarasuk and Yuan 2009)."""


def seconds(cluster: ClusterSpec, kind: str, axes: list[tuple[int, int]], n_bytes: float) -> float:
    columns = tuple((np.array([size]), np.array([stride])) for size, stride in axes)
    return float(CollectiveClock(cluster).seconds(kind, columns, np.array([n_bytes])).item())


def widest_port(cluster: ClusterSpec) -> float:
    """All the links of a device together at nominal speed: more than any algorithm can use, bytes/s."""
    inner, total = 1, 0.0
    for tier in cluster.tiers:
        links = tier.devices // inner - 1 if tier.kind == "mesh" else 1
        total += links * tier.link_bandwidth_bytes_per_s
        inner = tier.devices or inner
    return total


@pytest.mark.parametrize("kind", RECEIVED)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("size", "stride"), [(2, 1), (4, 1), (8, 1), (2, 4), (4, 2)])
def test_no_collective_moves_more_than_all_links_of_a_device(cluster: str, kind: str, size: int, stride: int) -> None:
    found, n_bytes = find_cluster(cluster), 2.0**32
    least = RECEIVED[kind] * (size - 1) / size * n_bytes / widest_port(found)
    assert seconds(found, kind, [(size, stride)], n_bytes) >= least


@pytest.mark.parametrize("kind", RECEIVED)
@pytest.mark.parametrize("cluster", CLUSTERS[:4])
def test_between_nodes_no_collective_beats_the_network_port(cluster: str, kind: str) -> None:
    """One rank of each of four nodes: each has only its own port to the others."""
    found = find_cluster(cluster)
    n_bytes, ports = (
        2.0**32,
        {t.port or t.name: t.link_bandwidth_bytes_per_s for t in found.tiers if t.kind == "switch"},
    )
    far = [(4, found.devices_per_node)]
    assert seconds(found, kind, far, n_bytes) >= RECEIVED[kind] * 3 / 4 * n_bytes / max(ports.values())


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("kind", [*RECEIVED, "send_recv"])
def test_a_group_of_one_and_a_message_of_nothing_take_no_time(cluster: str, kind: str) -> None:
    found = find_cluster(cluster)
    assert seconds(found, kind, [(1, 1), (1, 8)], 1e9) == 0.0
    assert seconds(found, kind, [(2, 1)], 0.0) == 0.0


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("kind", [*RECEIVED, "send_recv"])
@given(small=st.floats(1.0, 1e10), factor=st.floats(1.0, 1e3))
@settings(max_examples=15, deadline=None)
def test_more_bytes_never_take_less_time(cluster: str, kind: str, small: float, factor: float) -> None:
    found = find_cluster(cluster)
    assert seconds(found, kind, [(8, 1)], small) <= seconds(found, kind, [(8, 1)], small * factor)


def test_a_pipeline_over_a_border_of_nodes_pays_for_the_hop_that_crosses_it() -> None:
    """Ranks 0, 4, 8, 12 on nodes of 8: the hop from 4 to 8 leaves the node although 0 to 4 and 8 to 12 do not."""
    found = find_cluster("atlas-800t-a2")
    four, two = (
        CollectiveClock(found)
        .seconds("send_recv", Groups.of(Layouts.of([Layout(tp=4, sp=True, pp=pp)])).pp, np.array([2.0**28]))
        .item()
        for pp in (4, 2)
    )
    roce = next(tier for tier in found.tiers if tier.name == "roce")
    mesh = next(tier for tier in found.tiers if tier.name == "mesh")
    assert four >= 2.0**28 / roce.link_bandwidth_bytes_per_s
    assert two == pytest.approx(2.0**28 / mesh.reachable_bandwidth_bytes_per_s, rel=0.01)
    assert four != two


def test_each_layout_of_a_column_is_timed_on_its_own_group() -> None:
    """Groups are looked up once each and dealt back: the same as one layout at a time, in a shape that broadcasts."""
    found = find_cluster("atlas-800t-a2")
    sizes, strides = np.array([1, 2, 4, 8, 2]).reshape(-1, 1), np.array([1, 1, 2, 8, 16]).reshape(-1, 1)
    n_bytes = np.array([0.0, 1e3, 1e6, 1e9]).reshape(1, -1)
    together = CollectiveClock(found).seconds("all_reduce", ((sizes, strides),), n_bytes)
    assert together.shape == (5, 4)
    for row in range(5):
        axes = [(int(sizes[row, 0]), int(strides[row, 0]))]
        for column in range(4):
            assert together[row, column] == seconds(found, "all_reduce", axes, float(n_bytes[0, column]))
