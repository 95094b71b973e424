"""Clusters check themselves, their device counts, and their changed copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.cluster_files import load_shipped_cluster
from cost_models.errors import TitanPlanError

A2 = load_shipped_cluster("atlas-800t-a2")
SUPERPOD = load_shipped_cluster("atlas-a3-superpod")


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 96, 1120, 8192])
def test_whole_nodes_and_divisors_of_a_node_are_device_counts(count: int) -> None:
    A2.check_devices(count)


@pytest.mark.parametrize(
    ("count", "code", "hint"),
    [
        (0, "T301", "8"),
        (-8, "T301", "8"),
        (3, "T304", "use 2 or 4"),
        (5, "T304", "use 4 or 8"),
        (7, "T304", "use 4 or 8"),
        (63, "T303", "use 56 or 64"),
        (100, "T303", "use 96 or 104"),
    ],
)
def test_other_counts_are_refused_with_the_nearest_ones(count: int, code: str, hint: str) -> None:
    with pytest.raises(TitanPlanError) as caught:
        A2.check_devices(count)
    assert (caught.value.code, caught.value.exit_code) == (code, 2)
    assert hint in caught.value.hint
    assert str(count) in caught.value.message


def test_the_refusal_shows_its_arithmetic() -> None:
    with pytest.raises(TitanPlanError, match=r"12 x 8 = 96, 4 left over"):
        A2.check_devices(100)


def test_a_bounded_cluster_never_hints_beyond_its_bound() -> None:
    local = load_shipped_cluster("local")
    with pytest.raises(TitanPlanError, match="at most 8"):
        local.check_devices(16)
    bounded = replace(A2, max_devices=20)
    with pytest.raises(TitanPlanError) as caught:
        bounded.check_devices(18)
    assert caught.value.hint == "use 16"


@pytest.mark.parametrize(("devices", "nodes"), [(1, 1), (8, 1), (9, 2), (64, 8)])
def test_a_part_of_a_node_counts_as_a_node(devices: int, nodes: int) -> None:
    assert A2.n_nodes(devices) == nodes


def test_fp8_falls_back_to_the_half_precision_peak() -> None:
    assert A2.device.peak_flops("fp8") == A2.device.peak_flops("bf16") == 353.9e12
    assert load_shipped_cluster("v100-16g").device.peak_flops("fp8") == 125e12
    assert load_shipped_cluster("dgx-h100").device.peak_flops("fp8") == 1979e12


@pytest.mark.parametrize("name", ["v100-16g", "atlas-800-910a"])
def test_bf16_on_a_device_without_it_is_an_error_that_names_fp16(name: str) -> None:
    device = load_shipped_cluster(name).device
    with pytest.raises(TitanPlanError) as caught:
        device.peak_flops("bf16")
    assert caught.value.code == "T305"
    assert "fp16" in caught.value.hint
    assert device.default_precision == "fp16"


def test_an_unknown_precision_is_an_error() -> None:
    with pytest.raises(TitanPlanError, match="int3"):
        A2.device.peak_flops("int3")


@pytest.mark.parametrize(
    "change",
    [
        {"tiers": ()},
        {"tiers": (A2.tiers[1], A2.tiers[0])},
        {"tiers": (replace(A2.tiers[0], devices=6), A2.tiers[1])},
        {"devices_per_node": 0},
        {"devices_per_node": 3},
        {"collective_library": "mpi"},
        {"tiers": A2.tiers[:1]},
        {"host_memory_bytes": -1},
    ],
)
def test_a_cluster_whose_parts_do_not_fit_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(TitanPlanError):
        replace(A2, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "ring"},
        {"devices": 1},
        {"devices": 0},
        {"efficiency": 1.2},
        {"efficiency": 0.0},
        {"link_bandwidth_bytes_per_s": 0.0},
        {"latency_s": -1.0},
        {"algorithms": ()},
        {"selection": "random"},
    ],
)
def test_a_tier_that_no_wire_could_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(TitanPlanError):
        replace(A2.tiers[0], **change)


@pytest.mark.parametrize(
    "change",
    [
        {"vendor": "acme"},
        {"usable_memory_bytes": 2**40},
        {"peak_flops_by_precision": (("bf16", 1e12),)},
        {"cores": 0},
        {"memory_bandwidth_bytes_per_s": 0.0},
    ],
)
def test_a_device_with_impossible_numbers_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(TitanPlanError):
        replace(A2.device, **change)


def test_another_network_bandwidth_changes_only_the_outermost_tier() -> None:
    changed = SUPERPOD.with_inter_node_bandwidth(12.5e9)
    assert changed.tiers[-1].link_bandwidth_bytes_per_s == 12.5e9
    assert changed.tiers[:-1] == SUPERPOD.tiers[:-1]
    assert changed != SUPERPOD


def test_a_cluster_of_one_machine_has_no_network_to_change() -> None:
    with pytest.raises(TitanPlanError, match="no network"):
        load_shipped_cluster("local").with_inter_node_bandwidth(1e9)


@pytest.mark.parametrize(
    ("name", "node", "sizes"),
    [
        ("atlas-800t-a2", 1, [0]),
        ("atlas-800t-a2", 4, [4, 0]),
        ("atlas-800t-a2", 8, [8, 0]),
        ("atlas-800-910a", 2, [2, 0]),
        ("atlas-800-910a", 4, [4, 0]),
        ("atlas-200t-a2-box16", 8, [8, 0]),
        ("atlas-a3-superpod", 8, [2, 8, 768, 0]),
        ("dgx-a100-80g", 4, [4, 0]),
        ("dgx-a100-80g", 16, [16, 0]),
        ("gb200-nvl72", 8, [64, 0]),
        ("gb200-nvl72", 72, [72, 0]),
    ],
)
def test_other_node_sizes_keep_the_tiers_that_still_nest(name: str, node: int, sizes: list[int]) -> None:
    changed = load_shipped_cluster(name).with_devices_per_node(node)
    assert [tier.devices for tier in changed.tiers] == sizes
    assert changed.devices_per_node == node


def test_a_mesh_does_not_grow() -> None:
    with pytest.raises(TitanPlanError) as caught:
        A2.with_devices_per_node(16)
    assert caught.value.code == "T307"
    assert "box16" in caught.value.hint


def test_equal_clusters_hash_alike_and_notes_do_not_matter() -> None:
    twin: ClusterSpec = replace(A2, description="written differently", sources=())
    assert twin == A2
    assert hash(twin) == hash(A2)
