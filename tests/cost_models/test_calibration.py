"""Calibrations: each shipped device has one, and what is wrong with a file is told by key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cost_models.calibration import Calibration, calibration_of, load_calibration, parse_calibration
from cost_models.catalog import list_clusters
from cost_models.cluster_files import read_shipped_devices
from cost_models.errors import TitanPlanError
from cost_models.resources import configs_dir

SHARES = (
    "gemm_efficiency",
    "vector_efficiency",
    "optimizer_efficiency",
    "attention_forward_efficiency",
    "attention_backward_efficiency",
)
NUMBERS = sorted({field.name for field in fields(Calibration)} - {"name", "provenance", "caveat"})
FILES = sorted(path.name for path in configs_dir().joinpath("calibrations").iterdir() if path.name.endswith(".yaml"))


def shipped_file(name: str) -> dict[str, Any]:
    found = yaml.safe_load(configs_dir().joinpath("calibrations", name).read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("cluster", list_clusters(), ids=lambda cluster: cluster.name)
def test_every_shipped_cluster_has_constants(cluster: Any) -> None:  # noqa: ANN401 - a ClusterSpec, for the ids
    assert isinstance(calibration_of(cluster.device.name), Calibration)


@pytest.mark.parametrize("name", FILES)
def test_a_file_names_devices_that_exist(name: str) -> None:
    assert set(shipped_file(name)["devices"]) <= set(read_shipped_devices())


def test_no_device_has_two_calibrations() -> None:
    named = [device for name in FILES for device in shipped_file(name)["devices"]]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("name", FILES)
def test_constants_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    """Numbers that YAML 1.1 reads as text (8e-06) are numbers, from the catalogue and from a path alike."""
    values = shipped_file(name)
    copy = tmp_path / "mine.yaml"
    copy.write_text(yaml.safe_dump(values), encoding="utf-8")
    loaded = load_calibration(copy)
    assert loaded == calibration_of(values["devices"][0])
    for field in fields(Calibration):
        raw = values[field.name]
        assert getattr(loaded, field.name) == (raw if field.name in {"name", "provenance", "caveat"} else float(raw))


@pytest.mark.parametrize("name", FILES)
def test_constants_are_possible_and_say_where_they_come_from(name: str) -> None:
    found = calibration_of(shipped_file(name)["devices"][0])
    assert len(found.provenance) > 20
    assert all(0 < getattr(found, key) <= 1 for key in SHARES)
    # A launch is microseconds, and no kernel keeps more statistics than two rows of eight fp32 lanes.
    assert all(getattr(found, key) < 1e-3 for key in ("gemm_launch_s", "vector_launch_s", "dispatch_s"))
    assert found.softmax_statistics_bytes in {4, 8, 64}
    assert 0 < found.time_sigma < 1
    assert 0 < found.memory_sigma < 1


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TitanPlanError) as caught:
        calibration_of("abacus")
    assert "abacus" in caught.value.message
    assert "910b2" in caught.value.hint


def changed(**changes: Any) -> Callable[[dict[str, Any]], object]:  # noqa: ANN401 - whatever a YAML file may hold
    return lambda values: values | changes


def without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda values: {k: v for k, v in values.items() if k != key}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: ["a", "list"], "mapping"),
        (lambda _: None, "mapping"),
        (without("gemm_half_k"), "gemm_half_k"),
        (changed(gemm_eficiency=0.9), "gemm_eficiency"),
        (changed(dispatch_s="soon"), "soon"),
        (changed(dispatch_s=None), "my.yaml"),
        (changed(dispatch_s=[1, 2]), "my.yaml"),
        (changed(dispatch_s=10**400), "my.yaml"),
        (changed(dispatch_s=-1e-6), "dispatch_s"),
        (changed(dispatch_s=float("nan")), "dispatch_s"),
        (changed(dispatch_s=float("inf")), "dispatch_s"),
        (changed(memory_sigma=0), "memory_sigma"),
        *((changed(**{key: 1e300}), key) for key in NUMBERS),
        *((changed(**{key: 1e-300}), key) for key in SHARES),
        (changed(time_sigma=3.1), "time_sigma"),
        (changed(fragmentation=10.1), "fragmentation"),
        (changed(softmax_statistics_bytes=1e6 + 1), "softmax_statistics_bytes"),
        (changed(dispatch_s=True), "dispatch_s"),
        (changed(name="a\x1b[31m"), "control"),
        (changed(provenance=["x"] * 10**6), "provenance"),
        *((changed(**{key: value}), key) for key in SHARES for value in (0, 1.01, -0.5)),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_name(change: Callable[[dict[str, Any]], object], says: str) -> None:
    with pytest.raises(TitanPlanError) as caught:
        parse_calibration(change(shipped_file("ascend-910b.yaml")), "my.yaml")
    assert says in caught.value.message
    assert caught.value.hint
    assert len(caught.value.message) < 250
    assert "my.yaml" in caught.value.message or "ascend-910b-prior" in caught.value.message


def test_a_constant_may_be_zero_where_zero_means_something() -> None:
    found = calibration_of("910b2")
    assert replace(found, fragmentation=0.0, overlap_slowdown=0.0, dispatch_s=0.0).fragmentation == 0.0


@pytest.mark.parametrize(
    "content",
    [b"", b"- 1\n- 2\n", b"just words", b"a: [1, 2", b"\xff\xfe\x00", b"a: 2024-13-45\n", b"a: &x 1\na: *y\n"],
)
def test_a_file_that_is_no_calibration_is_an_error_and_no_traceback(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(TitanPlanError, match=r"broken\.yaml"):
        load_calibration(path)


def test_a_path_that_is_not_there_or_a_folder_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(TitanPlanError) as caught:
            load_calibration(path)
        assert str(path) in caught.value.message
