"""Numbers with units and sources out of YAML mappings, and errors that name the key, the unit and what would be right.

A number is plain, or `{value: 28, source: "..."}`. Its unit stands in its key: `memory_gib`, `link_bandwidth_gb_per_s`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from cost_models.errors import TitanPlanError

_BYTE_UNITS: Final = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


class Number(NamedTuple):
    """A number key: the field it fills, what one unit of it is, and whether the field is whole."""

    field: str
    unit: float = 1
    whole: bool = False
    required: bool = True


def read_numbers(
    mapping: Mapping[str, Any], schema: Mapping[str, Number], origin: str
) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Return the fields in base units, and the source of each key that names one."""
    fields: dict[str, Any] = {}
    sources: list[tuple[str, str]] = []
    for key, number in schema.items():
        if key not in mapping and not number.required:
            continue
        raw = required(mapping, key, origin)
        if isinstance(raw, Mapping):
            check_keys(raw, ("value", "source"), f"{origin} {key}")
            sources.append((key, str(raw.get("source", ""))))
            raw = required(raw, "value", f"{origin} {key}")
        fields[number.field] = _in_base_unit(raw, number, f"{origin}: {key}")
    return fields, tuple(sources)


def _in_base_unit(raw: Any, number: Number, what: str) -> float:  # noqa: ANN401 - whatever the YAML holds
    try:
        # YAML 1.1 reads 1e-4 as text; booleans are integers in Python and never a size.
        value = float("nan") if isinstance(raw, bool) else float(raw)
    except (TypeError, ValueError, OverflowError):
        value = float("nan")
    if math.isnan(value):
        raise TitanPlanError("C606", f"{what} is {raw!r}", "a number, zero or more")
    if not 0 <= value < float("inf"):
        raise TitanPlanError("C610", f"{what} is {raw!r}", "a number, zero or more")
    if not number.whole:
        return value * number.unit
    if number.unit == 1 and value != int(value):
        raise TitanPlanError("C606", f"{what} is {raw!r}", "a whole number")
    return round(value * number.unit)


def check_keys(mapping: Mapping[str, Any], known: tuple[str, ...], origin: str) -> None:
    """Refuse unknown keys, naming the nearest known one; a known key in another unit explains the units."""
    for key in mapping:
        if key in known:
            continue
        same_thing = _other_unit(str(key), known)
        if same_thing:
            raise TitanPlanError(
                "C609", f"{origin}: {key} has the wrong unit", _unit_hint(str(key), same_thing, mapping)
            )
        raise TitanPlanError("C605", f"{origin}: unknown key {key!r}", nearest_hint(str(key), known))


def _other_unit(key: str, known: tuple[str, ...]) -> str:
    stem, _, unit = key.rpartition("_")
    if unit not in _BYTE_UNITS:
        return ""
    return next((name for name in known if name.rpartition("_")[0] == stem and _unit_of(name)), "")


def _unit_of(key: str) -> str:
    unit = key.rpartition("_")[2]
    return unit if unit in _BYTE_UNITS else ""


def _unit_hint(key: str, expected: str, mapping: Mapping[str, Any]) -> str:
    raw = mapping[key]
    raw = raw.get("value") if isinstance(raw, Mapping) else raw
    got, want = _BYTE_UNITS[_unit_of(key)], _BYTE_UNITS[_unit_of(expected)]
    hint = f"1 {_spell(key)} is {got} bytes, 1 {_spell(expected)} is {want} bytes"
    if isinstance(raw, int | float):
        hint += f"; write {expected}: {raw * got / want:.6g} for {raw:g} {_spell(key)}"
    return hint


def _spell(key: str) -> str:
    unit = _unit_of(key)
    return f"{unit[0].upper()}{'i' if len(unit) == 3 else ''}B"


def nearest_hint(got: str, known: Iterable[str]) -> str:
    """Return a hint with the nearest known names, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(got.lower(), names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


def required(mapping: Mapping[str, Any], key: str, origin: str) -> Any:  # noqa: ANN401 - whatever the YAML holds
    """Return the value of a key that must be there."""
    if mapping.get(key) is None:
        raise TitanPlanError("C608", f"{origin}: {key} is missing")
    return mapping[key]


def text_of(mapping: Mapping[str, Any], key: str, origin: str) -> str:
    """Return a required text."""
    return str(required(mapping, key, origin))


def list_of(mapping: Mapping[str, Any], key: str, origin: str) -> list[Any]:
    """Return a required list with at least one entry."""
    raw = required(mapping, key, origin)
    if not isinstance(raw, list) or not raw:
        raise TitanPlanError("C606", f"{origin}: {key} is {raw!r}", "a list with at least one entry")
    return raw
