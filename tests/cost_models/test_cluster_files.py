"""Shipped cluster files are complete and sourced; mistakes in a user's file are named."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cost_models.cluster_drawing import draw_tiers
from cost_models.cluster_files import (
    cluster_index,
    load_cluster_file,
    load_shipped_cluster,
    parse_cluster,
    read_shipped_clusters,
    read_shipped_devices,
)
from cost_models.errors import TitanPlanError
from cost_models.resources import configs_dir

SHIPPED = sorted(read_shipped_clusters())
FILES = sorted(
    (file for file in configs_dir().joinpath("clusters").iterdir() if file.name.endswith(".yaml")),
    key=lambda file: file.name,
)
MEASURED = [
    "A100-80G", "A100-40G", "H100-80G", "H200", "B200", "GB200", "GB300", "B300", "V100-16G", "V100-32G",
    "A800-80G", "H800-80G", "910A", "910B", "910B1", "910B2", "910B3", "910B4", "910B4-1", "A3", "910C",
]  # fmt: skip


def own_cluster() -> dict[str, Any]:
    return {
        "name": "ours",
        "device": "910b3",
        "devices_per_node": 8,
        "host_memory_gib": 512,
        "collective_library": "hccl",
        "communicator_buffer_mib": 400,
        "p2p_buffer_mib": 40,
        "tiers": [
            {"name": "mesh", "kind": "mesh", "devices": 8, "link_bandwidth_gb_per_s": 28, "efficiency": 0.6,
             "latency_us": 10, "algorithms": ["mesh"]},
            {"name": "roce", "kind": "switch", "devices": 0, "link_bandwidth_gb_per_s": 25, "efficiency": 0.8,
             "latency_us": 20, "half_bandwidth_kib": 64, "algorithms": ["ring", "NHR"]},
        ],
    }  # fmt: skip


def error_of(mapping: dict[str, Any]) -> TitanPlanError:
    with pytest.raises(TitanPlanError) as caught:
        parse_cluster(mapping, "ours.yaml")
    assert "ours.yaml" in caught.value.message
    assert caught.value.exit_code == 2
    assert caught.value.hint
    assert len(caught.value.message) < 250
    return caught.value


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_number_of_a_shipped_file_names_its_source(file: Traversable) -> None:
    def check(node: object, path: str) -> None:
        if isinstance(node, dict) and "value" in node:
            assert set(node) == {"value", "source"}, path
            assert len(str(node["source"])) > 3, path
        elif isinstance(node, dict):
            for key, value in node.items():
                check(value, f"{path}.{key}")
        elif isinstance(node, list):
            for value in node:
                check(value, path)
        else:
            assert isinstance(node, str), f"{path} is a bare {node!r}"

    check(yaml.safe_load(file.read_text(encoding="utf-8")), file.name)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_cluster_has_the_name_of_its_file(name: str) -> None:
    assert cluster_index()[name].name == f"{name}.yaml"


@pytest.mark.parametrize("name", MEASURED)
def test_the_device_names_of_measurements_lead_to_a_cluster(name: str) -> None:
    assert load_shipped_cluster(name.lower()).name in SHIPPED


def test_every_device_is_used_or_is_the_other_bin_of_one() -> None:
    used = {cluster.device.name for cluster in read_shipped_clusters().values()}
    assert set(read_shipped_devices()) - used == {"a3-die-560t"}


@pytest.mark.parametrize(
    ("name", "clock_ghz"), [("910b1", 1.85), ("910b2", 1.8), ("910b3", 1.8), ("910b4", 1.5), ("a3-die", 1.8)]
)
def test_ascend_peaks_are_the_core_count_rule(name: str, clock_ghz: float) -> None:
    device = read_shipped_devices()[name]
    by_rule = device.cores * 16**3 * 2 * clock_ghz * 1e9
    assert device.peak_flops("bf16") == pytest.approx(by_rule, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "tier", "gb_per_s"),
    [
        ("atlas-800t-a2", "mesh", 18.3),
        ("atlas-800t-a2", "roce", 20.0),
        ("atlas-800-910a", "hccs", 10.0),
        ("atlas-800-910a", "pcie", 19.3),
        ("atlas-200t-a2-box16", "pcie", 54.4),
        ("atlas-a3-superpod", "die", 204.0),
        ("dgx-h100", "nvlink", 370.0),
    ],
)
def test_reachable_bandwidths_are_those_that_hccl_and_nccl_show(name: str, tier: str, gb_per_s: float) -> None:
    tiers = {each.name: each for each in load_shipped_cluster(name).tiers}
    assert tiers[tier].reachable_bandwidth_bytes_per_s == pytest.approx(gb_per_s * 1e9, rel=0.01)


def test_the_small_bin_differs_from_its_base_only_in_the_device() -> None:
    small, base = load_shipped_cluster("910b4"), load_shipped_cluster("910b")
    assert small.tiers == base.tiers
    assert small.device.memory_bytes == 32 * 2**30
    assert small.device.memory_bandwidth_bytes_per_s == 0.8e12


def test_plain_numbers_and_numbers_as_text_are_read_with_their_units() -> None:
    mapping = own_cluster()
    mapping["tiers"][1]["latency_us"] = "2e1"
    cluster = parse_cluster(mapping, "ours.yaml")
    assert cluster.host_memory_bytes == 512 * 2**30
    assert cluster.communicator_buffer_bytes == 400 * 2**20
    assert cluster.tiers[1].latency_s == pytest.approx(20e-6)
    assert cluster.tiers[1].half_bandwidth_bytes == 64 * 2**10
    assert cluster.tiers[0].link_bandwidth_bytes_per_s == 28e9


def test_a_device_may_stand_in_place() -> None:
    mapping = own_cluster()
    mapping["device"] = {
        "vendor": "ascend", "peak_tflops": {"bf16": 300, "fp32": 80}, "vector_tflops": 9, "memory_gib": 64,
        "usable_memory_gib": 60, "memory_bandwidth_gb_per_s": 1600, "cores": 20,
    }  # fmt: skip
    assert parse_cluster(mapping, "ours.yaml").device.peak_flops("bf16") == 300e12


def test_a_user_file_is_read_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(yaml.safe_dump(own_cluster()), encoding="utf-8")
    assert load_cluster_file(path).name == "ours"


def test_gb_where_gib_is_expected_explains_both() -> None:
    mapping = own_cluster()
    mapping["host_memory_gb"] = mapping.pop("host_memory_gib")
    error = error_of(mapping)
    assert error.code == "C609"
    assert "1000000000" in error.hint
    assert "1073741824" in error.hint
    assert "host_memory_gib: 476.837" in error.hint


def test_an_unknown_key_names_the_nearest() -> None:
    mapping = own_cluster()
    mapping["tiers"][0]["latencyus"] = 3
    error = error_of(mapping)
    assert error.code == "C605"
    assert "latency_us" in error.hint


@pytest.mark.parametrize("key", ["name", "device", "tiers", "devices_per_node", "host_memory_gib"])
def test_a_missing_key_is_named(key: str) -> None:
    mapping = own_cluster()
    del mapping[key]
    assert key in error_of(mapping).message
    assert key in error_of(mapping).hint


@pytest.mark.parametrize("value", ["many", -1, True, 7.5, None, [8], float("nan"), float("inf")])
def test_what_is_no_count_is_refused(value: object) -> None:
    mapping = own_cluster()
    mapping["devices_per_node"] = value
    assert "devices_per_node" in error_of(mapping).message


@pytest.mark.parametrize(("key", "value"), [("tiers", "mesh"), ("tiers", []), ("tiers", [3]), ("base", "atlas-9000")])
def test_what_is_no_list_of_tiers_or_no_base_is_refused(key: str, value: object) -> None:
    assert error_of({**own_cluster(), key: value}).code in ("C606", "C602")


def test_an_unknown_device_names_near_ones() -> None:
    assert "910b3" in error_of({**own_cluster(), "device": "910b33"}).hint


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "", "!!python/object/apply:os.getcwd []"])
def test_text_that_is_no_mapping_is_an_error_without_traceback(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TitanPlanError, match=r"broken\.yaml"):
        load_cluster_file(path)


def test_a_file_that_is_not_there_is_an_error_without_traceback(tmp_path: Path) -> None:
    with pytest.raises(TitanPlanError, match="nowhere"):
        load_cluster_file(tmp_path / "nowhere.yaml")


def test_reading_clusters_imports_nothing_heavy() -> None:
    script = (
        "import sys, cost_models.collectives, cost_models.cluster_drawing, cost_models.cluster_files as f\n"
        "f.load_shipped_cluster('910b')\n"
        "print([m for m in ('networkx', 'pandas', 'torch', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", SHIPPED)
def test_the_drawing_fits_a_terminal_and_shows_each_tier(name: str) -> None:
    cluster = load_shipped_cluster(name)
    drawing = draw_tiers(cluster)
    assert max(len(line) for line in drawing.splitlines()) <= 100
    for tier in cluster.tiers:
        assert f"+- {tier.name}: " in drawing
        assert f"{tier.link_bandwidth_bytes_per_s / 1e9:.4g} GB/s nominal" in drawing
        assert f"{tier.latency_s * 1e6:.4g} us" in drawing


def test_the_drawing_says_what_a_pair_of_a_mesh_gets() -> None:
    assert "a group of 2 gets 18.31, of 8 gets 128.2" in draw_tiers(load_shipped_cluster("910b"))


DEVICE = {
    "vendor": "ascend", "peak_tflops": {"bf16": 300, "fp32": 80}, "vector_tflops": 9, "memory_gib": 64,
    "usable_memory_gib": 60, "memory_bandwidth_gb_per_s": 1600, "cores": 20, "gemm_tile_m": 128, "gemm_tile_n": 256,
    "l2_mib": 9, "host_bandwidth_gb_per_s": 20, "context_gib": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("value", [1e300, 10**400, "1e400", -1, float("nan"), [[["x"] * 999] * 999], "x" * 999])
@pytest.mark.parametrize("key", sorted(DEVICE.keys() - {"vendor", "peak_tflops"}))
def test_a_number_that_no_device_has_is_refused(key: str, value: object) -> None:
    error = error_of({**own_cluster(), "device": {**DEVICE, key: value}})
    assert error.code in {"C606", "C610"}
    assert key in error.message


@pytest.mark.parametrize("value", [1e300, 10**400, -1, "x" * 999])
@pytest.mark.parametrize("key", ["devices_per_node", "host_memory_gib", "communicator_buffer_mib", "p2p_buffer_mib"])
def test_a_number_that_no_cluster_has_is_refused(key: str, value: object) -> None:
    assert key in error_of({**own_cluster(), key: value}).message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("link_bandwidth_gb_per_s", 1e-10),
        ("link_bandwidth_gb_per_s", 1e300),
        ("efficiency", 1e-7),
        ("efficiency", 1.1),
        ("latency_us", 1e10),
        ("half_bandwidth_kib", 1e20),
        ("devices", 1e300),
    ],
)
def test_a_number_that_no_link_has_is_refused_with_the_range(key: str, value: float) -> None:
    mapping = own_cluster()
    mapping["tiers"][0][key] = value
    error = error_of(mapping)
    assert (error.code, key in error.message) == ("C610", True)
    assert "from" in error.hint


@pytest.mark.parametrize(
    "device",
    [
        DEVICE | {"peak_tflops": {"bf16": 1e300, "fp32": 1}},
        DEVICE | {"peak_tflops": {"bf16": 1}},
        DEVICE | {"peak_tflops": {f"p{i}": 1 for i in range(100_000)}},
        DEVICE | {"peak_tflops": 3},
        DEVICE | {"usable_memory_gib": 65},
        DEVICE | {"vendor": "a" * 999},
        {},
        ["910b3"],
    ],
)
def test_a_device_that_cannot_be_is_told_what_would_be_right(device: object) -> None:
    mapping = {**own_cluster(), "device": device}
    with pytest.raises(TitanPlanError) as caught:
        parse_cluster(mapping, "ours.yaml")
    assert caught.value.hint


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[31mred", "x" * 201])
def test_a_name_that_garbles_a_terminal_is_refused(name: str) -> None:
    with pytest.raises(TitanPlanError) as caught:
        parse_cluster({**own_cluster(), "name": name}, "ours.yaml")
    assert caught.value.code == "C610"
