"""Calibration: the fitted constants of a device and software stack, few and physical, with where they come from."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from cost_models.errors import TitanPlanError
from cost_models.resources import configs_dir
from cost_models.yaml_files import read_mapping, read_yaml
from cost_models.yaml_numbers import Range, as_float, check_keys, check_name, plain, required, scalar_text, shorten

if TYPE_CHECKING:
    from pathlib import Path


_SHARE: Final = Range(1e-4, 1)
_SECONDS: Final = Range(0, 1000)
_HALF: Final = Range(0, 10**9)
_RANGES: Final = {
    "gemm_efficiency": _SHARE,
    "gemm_half_k": _HALF,
    "gemm_launch_s": _SECONDS,
    "vector_efficiency": _SHARE,
    "vector_launch_s": _SECONDS,
    "attention_forward_efficiency": _SHARE,
    "attention_backward_efficiency": _SHARE,
    "attention_half_seq": _HALF,
    "dispatch_s": _SECONDS,
    "overlap_slowdown": Range(0, 100),
    "optimizer_efficiency": _SHARE,
    "softmax_statistics_bytes": Range(0, 10**6),
    "fragmentation": Range(0, 10),
    "step_overhead_s": _SECONDS,
    "time_sigma": Range(0, 3),
    "memory_sigma": Range(1e-6, 3),  # above 0: P(fits) is measured in it
}
"""What each constant may be; beyond it a number is a slip of the unit, and times and odds leave what floats hold."""

_TEXTS = ("name", "provenance", "caveat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants of one device family.

    Attributes:
        gemm_efficiency: share of peak that a large GEMM with full tiles and waves reaches.
        gemm_half_k: inner size at which a tile spends as long on its start and end as on its products.
        gemm_launch_s: time on the device before and after a GEMM that no neighbour hides.
        vector_efficiency: share of the memory bandwidth that a streaming kernel reaches.
        vector_launch_s: the same for a vector kernel.
        attention_forward_efficiency, attention_backward_efficiency: share of peak of the fused kernel, long sequences.
        attention_half_seq: sequence length at which fused attention reaches half of that.
        dispatch_s: host time to issue one kernel; the device waits where its kernels are shorter.
        overlap_slowdown: seconds that compute loses for each second of communication beside it.
        optimizer_efficiency: share of the memory bandwidth that the fused optimizer reaches.
        softmax_statistics_bytes: bytes a token and head that the fused attention kernel keeps for backward.
        fragmentation: reserved over allocated memory of torch's allocator, less 1.
        step_overhead_s: fixed time of a step outside of forward, backward, communication and update.
        time_sigma: standard deviation of log(measured / predicted) step time.
        memory_sigma: standard deviation of measured / predicted memory.
        provenance: what the constants were read from or fitted on.
        caveat: one line that whoever reads a prediction should know; may be left out.
    """

    name: str
    gemm_efficiency: float
    gemm_half_k: float
    gemm_launch_s: float
    vector_efficiency: float
    vector_launch_s: float
    attention_forward_efficiency: float
    attention_backward_efficiency: float
    attention_half_seq: float
    dispatch_s: float
    overlap_slowdown: float
    optimizer_efficiency: float
    softmax_statistics_bytes: float
    fragmentation: float
    step_overhead_s: float
    time_sigma: float
    memory_sigma: float
    provenance: str
    caveat: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "name of a calibration")
        for key, allowed in _RANGES.items():
            value = getattr(self, key)
            if not allowed.holds(value):
                message = f"calibration {plain(self.name)}: {key} is {shorten(value)}"
                raise TitanPlanError("C610", message, f"{allowed.tell()} is needed")


def parse_calibration(values: object, origin: str) -> Calibration:
    """A calibration from the mapping of a YAML file; errors name the key and the file."""
    if not isinstance(values, dict):
        raise TitanPlanError("C606", f"{origin} holds no mapping of constants", "see configs/calibrations/")
    known = tuple(field.name for field in fields(Calibration))
    check_keys(values, (*known, "devices"), origin)
    given = {key: required({"caveat": "", **values}, key, origin, _right(key)) for key in known}
    texts = {key: scalar_text(given[key], f"{origin}: {key}") for key in _TEXTS}
    numbers = {key: as_float(given[key]) for key in _RANGES}
    for key, number in numbers.items():
        if math.isnan(number):
            raise TitanPlanError("C606", f"{origin}: {key} is {shorten(given[key])}", f"{_right(key)} is needed")
    try:
        return Calibration(**texts, **numbers)  # type: ignore[arg-type]
    except TitanPlanError as error:
        raise TitanPlanError(error.code, f"{origin}: {error.message}", error.hint) from None


def _right(key: str) -> str:
    return _RANGES[key].tell() if key in _RANGES else "text"


def load_calibration(path: Path) -> Calibration:
    """A calibration that a user gave by path."""
    return parse_calibration(read_yaml(path), str(path))


@lru_cache(maxsize=1)
def _shipped() -> dict[str, Calibration]:
    """Device name to calibration, from the files that we ship."""
    found: dict[str, Calibration] = {}
    for entry in sorted((configs_dir() / "calibrations").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".yaml"):
            values = read_mapping(entry)
            calibration = parse_calibration(values, entry.name)
            found.update(dict.fromkeys(values["devices"], calibration))
    return found


def calibration_of(device_name: str) -> Calibration:
    """The shipped constants of a device; C613 where none are shipped."""
    shipped = _shipped()
    if device_name not in shipped:
        raise TitanPlanError(
            "C613",
            f"no calibration for device {shorten(device_name)}",
            f"give one with --calibration; known: {', '.join(shipped)}",
        )
    return shipped[device_name]
