"""Sizes and counts as people type them: `2GiB`, `5%`, `2T` tokens."""

from __future__ import annotations

import re

from cost_models.errors import TitanPlanError

_COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_MEMORY = {"mib": 2**20, "gib": 2**30, "mb": 10**6, "gb": 10**9}
_NUMBER = re.compile(r"^([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)$")


def parse_tokens(text: str) -> float:
    """A number of tokens: `2T`, `300B`, `1.5e12`."""
    found = _NUMBER.match(text.strip())
    unit = found.group(2).lower() if found else "?"
    value = float(found.group(1)) * _COUNT[unit] if found and unit in _COUNT else 0.0
    if not 1 <= value < float("inf"):
        raise TitanPlanError("C610", f"--tokens {text!r} is not a number of tokens", "write it as 2T, 300B or 1.5e12")
    return value


def parse_memory(option: str, text: str, *, whole_bytes: int) -> int:
    """Bytes of `2GiB`, `2000MiB`, `5%` of the device, or `2` (GiB).

    GB (1e9 bytes) is refused: device memory is meant in GiB (2**30), and the difference of 7 % decides what fits.
    """
    found = _NUMBER.match(text.strip())
    if not found:
        raise TitanPlanError("C610", f"{option} {text!r} is not an amount of memory", "write it as 2GiB or 5%")
    value, unit = float(found.group(1)), found.group(2).lower()
    if unit == "%":
        value, unit = value / 100 * whole_bytes, "b"
    if unit in {"gb", "mb"}:
        proper = "GiB" if unit == "gb" else "MiB"
        exact = value * _MEMORY[unit] / _MEMORY[proper.lower()]
        raise TitanPlanError(
            "C609",
            f"{option} {text!r} is in {unit.upper()} ({'1e9' if unit == 'gb' else '1e6'} bytes)",
            f"device memory is counted in {proper}: {value:g} {unit.upper()} are {exact:.2f}{proper}",
        )
    scale = {"b": 1, "": 2**30, **_MEMORY}.get(unit)
    if scale is None or not value * scale < 2**60:
        raise TitanPlanError("C610", f"{option} {text!r} is not an amount of memory", "write it as 2GiB or 5%")
    return round(value * scale)
