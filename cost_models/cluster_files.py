"""Cluster and device YAML files -> ClusterSpec and DeviceSpec, with every key, unit and source checked.

A number is plain, or `{value: 28, source: "..."}`; shipped files always name the source. Units stand in the keys and
are not guessed: `_gib` is 2^30 bytes, `_gb` is 10^9, `_gb_per_s` is 10^9 bytes a second per direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cost_models.cluster import (
    BANDWIDTH,
    BYTES,
    COLLECTIVE_LIBRARIES,
    EFFICIENCY,
    FLOPS,
    HOST_BANDWIDTH,
    LATENCY,
    PRECISIONS,
    SIZE,
    TIER_KINDS,
    VENDORS,
    ClusterSpec,
    DeviceSpec,
    TierSpec,
)
from cost_models.errors import TitanPlanError
from cost_models.resources import configs_dir
from cost_models.yaml_files import parse_yaml, read_mapping, read_text
from cost_models.yaml_numbers import (
    COUNT,
    Number,
    check_keys,
    list_of,
    nearest_hint,
    plain,
    read_numbers,
    required,
    scalar_text,
    shorten,
    text_of,
)

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

DEVICES_FILE: Final = "devices.yaml"


_DEVICE_NUMBERS: Final = {
    "vector_tflops": Number("vector_flops", 1e12, FLOPS),
    "memory_gib": Number("memory_bytes", 2**30, BYTES, whole=True),
    "usable_memory_gib": Number("usable_memory_bytes", 2**30, BYTES, whole=True),
    "memory_bandwidth_gb_per_s": Number("memory_bandwidth_bytes_per_s", 1e9, BANDWIDTH),
    "cores": Number("cores", 1, SIZE, whole=True),
    "gemm_tile_m": Number("gemm_tile_m", 1, SIZE, whole=True, required=False),
    "gemm_tile_n": Number("gemm_tile_n", 1, SIZE, whole=True, required=False),
    "l2_mib": Number("l2_bytes", 2**20, BYTES, whole=True, required=False),
    "host_bandwidth_gb_per_s": Number("host_bandwidth_bytes_per_s", 1e9, HOST_BANDWIDTH, required=False),
    "context_gib": Number("context_bytes", 2**30, BYTES, whole=True, required=False),
}
_TIER_NUMBERS: Final = {
    "devices": Number("devices", 1, COUNT, whole=True),
    "link_bandwidth_gb_per_s": Number("link_bandwidth_bytes_per_s", 1e9, BANDWIDTH),
    "efficiency": Number("efficiency", 1, EFFICIENCY),
    "latency_us": Number("latency_s", 1e-6, LATENCY),
    "half_bandwidth_kib": Number("half_bandwidth_bytes", 2**10, BYTES, whole=True, required=False),
}
_CLUSTER_NUMBERS: Final = {
    "devices_per_node": Number("devices_per_node", 1, SIZE, whole=True),
    "max_devices": Number("max_devices", 1, COUNT, whole=True, required=False),
    "host_memory_gib": Number("host_memory_bytes", 2**30, BYTES, whole=True),
    "communicator_buffer_mib": Number("communicator_buffer_bytes", 2**20, BYTES, whole=True),
    "p2p_buffer_mib": Number("p2p_buffer_bytes", 2**20, BYTES, whole=True),
}
_PEAKS: Final = "a mapping such as {bf16: 353.9, fp32: 99.5}"
_DEVICE_KEYS: Final = ("vendor", "notes", "peak_tflops", *_DEVICE_NUMBERS)
_TIER_KEYS: Final = ("name", "kind", "algorithms", "selection", "port", *_TIER_NUMBERS)
_CLUSTER_KEYS: Final = (
    "name",
    "aliases",
    "base",
    "description",
    "device",
    "collective_library",
    "tiers",
    *_CLUSTER_NUMBERS,
)


def load_cluster_file(path: str | Path) -> ClusterSpec:
    """Read a cluster from a file of the user's; its device is a name of `devices.yaml` or a mapping in place."""
    return parse_cluster(read_mapping(Path(path)), str(path))


def load_shipped_cluster(name: str) -> ClusterSpec:
    """Read a shipped cluster by exact name or alias in lower case, as `cluster_index` has them."""
    return _read_shipped(cluster_index()[name].name)


def read_shipped_clusters() -> dict[str, ClusterSpec]:
    """Read every shipped cluster, by its own name."""
    clusters = (_read_shipped(file.name) for file in _cluster_files())
    return {cluster.name: cluster for cluster in clusters}


@lru_cache(maxsize=1)
def cluster_index() -> Mapping[str, Traversable]:
    """Return each shipped name and alias, in lower case, with its file; no cluster is built."""
    index: dict[str, Traversable] = {}
    for file in _cluster_files():
        for name in (file.name.removesuffix(".yaml"), *_aliases(file)):
            if index.setdefault(name.lower(), file) is not file:
                raise TitanPlanError(
                    "C614", f"{name} names both {index[name.lower()].name} and {file.name}", "rename one"
                )
    return index


def _cluster_files() -> list[Traversable]:
    files = configs_dir().joinpath("clusters").iterdir()
    found = [file for file in files if file.name.endswith(".yaml") and file.name != DEVICES_FILE]
    return sorted(found, key=lambda file: file.name)


def _aliases(file: Traversable) -> list[str]:
    """Read only the line of aliases: the whole catalogue costs 30 ms of YAML, which no command line should wait for."""
    for line in read_text(file).splitlines():
        if line.startswith("aliases:"):
            found = parse_yaml(line, file.name)
            return [str(alias) for alias in list_of(found, "aliases", file.name)] if isinstance(found, dict) else []
    return []


@lru_cache(maxsize=64)
def _read_shipped(file_name: str) -> ClusterSpec:
    return parse_cluster(_shipped_mapping(file_name), file_name)


def _shipped_mapping(file_name: str) -> dict[str, Any]:
    return read_mapping(configs_dir().joinpath("clusters", file_name))


@lru_cache(maxsize=1)
def read_shipped_devices() -> Mapping[str, DeviceSpec]:
    """Read the device table."""
    return {name: _parse_device(name, raw, DEVICES_FILE) for name, raw in _shipped_mapping(DEVICES_FILE).items()}


def parse_cluster(mapping: Mapping[str, Any], origin: str) -> ClusterSpec:
    """Build a cluster from the mapping of a file.

    Args:
        mapping: keys of a cluster file. With `base: NAME` the keys of that shipped cluster stand where none is given.
        origin: what errors name, usually the file.
    """
    check_keys(mapping, _CLUSTER_KEYS, origin)
    if "base" in mapping:
        mapping = {**_base_mapping(scalar_text(mapping["base"], f"{origin}: base"), origin), **mapping}
    numbers, sources = read_numbers(mapping, _CLUSTER_NUMBERS, origin)
    return ClusterSpec(
        name=text_of(mapping, "name", origin),
        description=scalar_text(mapping.get("description", ""), f"{origin}: description"),
        device=_device_of(required(mapping, "device", origin, "the name of a device, such as 910b2"), origin),
        tiers=tuple(_parse_tier(tier, origin) for tier in list_of(mapping, "tiers", origin)),
        collective_library=text_of(mapping, "collective_library", origin, f"one of {', '.join(COLLECTIVE_LIBRARIES)}"),
        sources=sources,
        **numbers,
    )


def _base_mapping(base: str, origin: str) -> dict[str, Any]:
    file = cluster_index().get(base.lower())
    if file is None:
        raise TitanPlanError(
            "C602", f"{origin}: base {shorten(base)} is not a shipped cluster", nearest_hint(base, cluster_index())
        )
    return _shipped_mapping(file.name)


def _device_of(raw: Any, origin: str) -> DeviceSpec:  # noqa: ANN401 - whatever the YAML holds
    if isinstance(raw, Mapping):
        return _parse_device(origin, raw, f"{origin} device")
    devices, name = read_shipped_devices(), scalar_text(raw, f"{origin}: device")
    if name.lower() not in devices:
        raise TitanPlanError("C612", f"{origin}: no device {shorten(name)}", nearest_hint(name, devices))
    return devices[name.lower()]


def _parse_device(name: str, raw: Any, origin: str) -> DeviceSpec:  # noqa: ANN401 - whatever the YAML holds
    if not isinstance(raw, Mapping):
        raise TitanPlanError("C606", f"{origin}: {plain(name)} is {shorten(raw)}", "a mapping, as in configs/clusters/")
    where = f"{origin} {name}"
    check_keys(raw, _DEVICE_KEYS, where)
    numbers, sources = read_numbers(raw, _DEVICE_NUMBERS, where)
    peaks = required(raw, "peak_tflops", where, _PEAKS)
    if not isinstance(peaks, Mapping):
        raise TitanPlanError("C606", f"{where}: peak_tflops is {shorten(peaks)}", _PEAKS)
    check_keys(peaks, PRECISIONS, f"{where} peak_tflops")
    schema = {key: Number(key, 1e12, FLOPS) for key in peaks}
    flops, peak_sources = read_numbers(peaks, schema, f"{where} peak_tflops")
    return DeviceSpec(
        name=name,
        vendor=text_of(raw, "vendor", where, f"one of {', '.join(VENDORS)}"),
        peak_flops_by_precision=tuple(flops.items()),
        notes=scalar_text(raw.get("notes", ""), f"{where}: notes"),
        sources=sources + tuple((f"peak_tflops {key}", source) for key, source in peak_sources),
        **numbers,
    )


def _parse_tier(raw: Any, origin: str) -> TierSpec:  # noqa: ANN401 - whatever the YAML holds
    if not isinstance(raw, Mapping):
        raise TitanPlanError("C606", f"{origin}: tier {shorten(raw)} is not a mapping", "see configs/clusters/")
    where = f"{origin} tier {plain(scalar_text(raw.get('name', '?'), f'{origin}: name of a tier'))}"
    check_keys(raw, _TIER_KEYS, where)
    numbers, sources = read_numbers(raw, _TIER_NUMBERS, where)
    return TierSpec(
        name=text_of(raw, "name", where),
        kind=text_of(raw, "kind", where, f"one of {', '.join(TIER_KINDS)}"),
        algorithms=tuple(scalar_text(name, f"{where}: algorithms") for name in list_of(raw, "algorithms", where)),
        selection=scalar_text(raw.get("selection", "cheapest"), f"{where}: selection"),
        port=scalar_text(raw.get("port", ""), f"{where}: port"),
        source="\n".join(f"{key}: {source}" for key, source in sources),
        **numbers,
    )
