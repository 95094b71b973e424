"""Sizes and counts as people type them: `2GiB`, `5%`, `2T` tokens."""

from __future__ import annotations

import re

from cost_models.errors import TitanPlanError
from cost_models.yaml_numbers import shorten

_COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_MEMORY = {"mib": 2**20, "gib": 2**30, "mb": 10**6, "gb": 10**9}
_MOST_TOKENS = 1e18
_MOST_BYTES = 2**60
_NUMBER = re.compile(r"^([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)$")


def parse_tokens(text: str) -> float:
    """A number of tokens: `2T`, `300B`, `1.5e12`."""
    found = _NUMBER.match(text.strip())
    unit = found.group(2).lower() if found else "?"
    value = float(found.group(1)) * _COUNT[unit] if found and unit in _COUNT else 0.0
    if not 1 <= value <= _MOST_TOKENS:
        message = f"--tokens {shorten(text)} is not a number of tokens"
        raise TitanPlanError("C610", message, "write it as 2T, 300B or 1.5e12; from 1 to 1e18")
    return value


def parse_memory(option: str, text: str, *, whole_bytes: int) -> int:
    """Bytes of `2GiB`, `2000MiB`, `5%` of the device, or `2` (GiB).

    GB (1e9 bytes) is refused: device memory is meant in GiB (2**30), and the difference of 7 % decides what fits.
    """
    found = _NUMBER.match(text.strip())
    value, unit = (float(found.group(1)), found.group(2).lower()) if found else (0.0, "?")
    if unit == "%":
        value, unit = value / 100 * whole_bytes, "b"
    scale = {"b": 1, "": 2**30, **_MEMORY}.get(unit)
    if scale is None or not value * scale < _MOST_BYTES:
        message = f"{option} {shorten(text)} is not an amount of memory"
        raise TitanPlanError("C610", message, "write it as 2GiB or 5%; at most 2**30 GiB")
    if unit in {"gb", "mb"}:
        proper = "GiB" if unit == "gb" else "MiB"
        exact = value * _MEMORY[unit] / _MEMORY[proper.lower()]
        raise TitanPlanError(
            "C609",
            f"{option} {shorten(text)} is in {unit.upper()} ({'1e9' if unit == 'gb' else '1e6'} bytes)",
            f"device memory is counted in {proper}: {value:g} {unit.upper()} are {exact:.2f}{proper}",
        )
    return round(value * scale)
