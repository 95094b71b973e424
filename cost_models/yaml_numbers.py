"""Numbers with units and sources out of YAML mappings, and errors that name the key, the unit and what would be right.

A number is plain, or `{value: 28, source: "..."}`. Its unit stands in its key: `memory_gib`, `link_bandwidth_gb_per_s`.
"""

from __future__ import annotations

import difflib
import math
import reprlib
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from cost_models.errors import TitanPlanError

_BYTE_UNITS: Final = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


_ECHO: Final = 80
"""Characters of a user's value that a complaint repeats."""
_NAME: Final = 200
_BIDI: Final = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_REPR: Final = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxlong, _REPR.maxother = 2, _ECHO, _ECHO, _ECHO


class Range(NamedTuple):
    """What a number may be: from `least` to `most`, both included; with `or_zero` also 0, which then means none."""

    least: float
    most: float
    or_zero: bool = False

    def holds(self, value: float) -> bool:
        """Tell whether the number is in the range; nan never is."""
        return self.least <= value <= self.most or (self.or_zero and value == 0)

    def tell(self, unit: float = 1, kind: str = "a number") -> str:
        """Say what would be right, in units of `unit`."""
        text = f"{kind} from {_plain_number(self.least / unit)} to {_plain_number(self.most / unit)}"
        return f"{text}, or 0" if self.or_zero and self.least > 0 else text


COUNT: Final = Range(0, 10**9)


class Number(NamedTuple):
    """A number key: the field it fills, what one unit of it is, its range in base units, and whether it is whole."""

    field: str
    unit: float = 1
    range: Range = COUNT
    whole: bool = False
    required: bool = True

    def tell(self) -> str:
        """Say what would be right, in the unit of the key."""
        return self.range.tell(self.unit, "a whole number" if self.whole and self.unit == 1 else "a number")


def read_numbers(
    mapping: Mapping[str, Any], schema: Mapping[str, Number], origin: str
) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Return the fields in base units, and the source of each key that names one."""
    fields: dict[str, Any] = {}
    sources: list[tuple[str, str]] = []
    for key, number in schema.items():
        if key not in mapping and not number.required:
            continue
        raw = required(mapping, key, origin, number.tell())
        if isinstance(raw, Mapping):
            check_keys(raw, ("value", "source"), f"{origin} {key}")
            sources.append((key, scalar_text(raw.get("source", ""), f"{origin} {key}: source")))
            raw = required(raw, "value", f"{origin} {key}", number.tell())
        fields[number.field] = _in_base_unit(raw, number, f"{origin}: {key}")
    return fields, tuple(sources)


def _in_base_unit(raw: Any, number: Number, what: str) -> float:  # noqa: ANN401 - whatever the YAML holds
    value = as_float(raw)
    if math.isnan(value):
        raise TitanPlanError("C606", f"{what} is {shorten(raw)}", number.tell())
    if not number.range.holds(value * number.unit):
        raise TitanPlanError("C610", f"{what} is {shorten(raw)}", number.tell())
    if not number.whole:
        return value * number.unit
    if number.unit == 1 and value != int(value):
        raise TitanPlanError("C606", f"{what} is {shorten(raw)}", "a whole number")
    return round(value * number.unit)


def as_float(raw: object) -> float:
    """Return the number that a value is or spells, inf for one beyond floats, nan for what is no number."""
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        return math.nan  # booleans are integers in Python and never a size
    try:
        return float(raw)  # YAML 1.1 reads 1e-4 as text
    except ValueError:
        return math.nan
    except OverflowError:
        return math.inf if int(raw) > 0 else -math.inf


def shorten(value: object) -> str:
    """Spell a value as in Python, at most 80 characters of it."""
    try:
        text = repr(value[: _ECHO + 1]) if isinstance(value, str) else _REPR.repr(value)
    except ValueError:  # Python spells no integer of more than 4300 digits
        return "a number of thousands of digits"
    return cut(text, _ECHO + 2)  # the quotes come on top


def plain(text: str) -> str:
    """Spell a name or a key without quotes, at most 80 characters of it; control characters are escaped."""
    return cut(text, _ECHO) if text[:_ECHO].isprintable() else shorten(text)


def cut(text: str, limit: int) -> str:
    """Return the text, or its beginning and "..."."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def check_name(name: str, what: str = "name") -> None:
    """Refuse a name that would garble a terminal or a report: control characters, or more than 200 characters."""
    if len(name) > _NAME:
        message = f"{what} has {len(name)} characters: {shorten(name)}"
        raise TitanPlanError("C610", message, f"a name of at most {_NAME} characters is needed")
    # Cc: control, Cs: half of a surrogate pair, Zl and Zp: line and paragraph separators.
    if any(unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"} or char in _BIDI for char in name):
        message = f"{what} is {shorten(name)}, which holds control characters"
        raise TitanPlanError("C610", message, "a name on one line, without escape codes, is needed")


def _plain_number(value: float) -> str:
    """Spell a bound: 10,000, 9.31323e+08, 1e-06."""
    return f"{int(value):,}" if value == int(value) and value < 10**10 else f"{value:g}"


def check_keys(mapping: Mapping[str, Any], known: tuple[str, ...], origin: str) -> None:
    """Refuse unknown keys, naming the nearest known one; a known key in another unit explains the units."""
    for key in mapping:
        if key in known:
            continue
        same_thing = _other_unit(str(key), known)
        if same_thing:
            raise TitanPlanError(
                "C609", f"{origin}: {plain(str(key))} has the wrong unit", _unit_hint(str(key), same_thing, mapping)
            )
        raise TitanPlanError("C605", f"{origin}: unknown key {shorten(key)}", nearest_hint(str(key), known))


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
    if COUNT.holds(as_float(raw)):
        raw = as_float(raw)
        hint += f"; write {expected}: {raw * got / want:.6g} for {raw:g} {_spell(key)}"
    return hint


def _spell(key: str) -> str:
    unit = _unit_of(key)
    return f"{unit[0].upper()}{'i' if len(unit) == 3 else ''}B"


def nearest_hint(got: str, known: Iterable[str]) -> str:
    """Return a hint with the nearest known names, or all of them."""
    names = list(known)
    # The search is quadratic in the length; no name of ours is as long as that.
    close = [] if len(got) > _ECHO else difflib.get_close_matches(got.lower(), names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


def required(mapping: Mapping[str, Any], key: str, origin: str, right: str = "") -> Any:  # noqa: ANN401 - any YAML
    """Return the value of a key that must be there; `right` says what would be right."""
    if mapping.get(key) is None:
        hint = f"add `{key}: ...`, {right or 'as in the files of configs/'}"
        raise TitanPlanError("C608", f"{origin}: {key} is missing", hint)
    return mapping[key]


def text_of(mapping: Mapping[str, Any], key: str, origin: str, right: str = "text") -> str:
    """Return a required text."""
    return scalar_text(required(mapping, key, origin, right), f"{origin}: {key}")


def scalar_text(value: object, what: str) -> str:
    """Return a value as text; a list or a map is none, and may spell out to gigabytes through YAML's aliases."""
    if isinstance(value, list | Mapping | set | tuple):
        raise TitanPlanError("C606", f"{what} is {shorten(value)}", "text is needed, no list or map")
    try:
        return str(value)
    except ValueError:
        raise TitanPlanError("C606", f"{what} is {shorten(value)}", "text is needed") from None


def list_of(mapping: Mapping[str, Any], key: str, origin: str) -> list[Any]:
    """Return a required list with at least one entry."""
    raw = required(mapping, key, origin, "a list with at least one entry")
    if not isinstance(raw, list) or not raw:
        raise TitanPlanError("C606", f"{origin}: {key} is {shorten(raw)}", "a list with at least one entry")
    return raw
