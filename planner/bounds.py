"""Bounds that a user sets on the search: `--fix tp=4,pp=4` and `--max tp=8`."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from cost_models.errors import TitanPlanError
from cost_models.layout import CP_KINDS, PLACEMENTS, RECOMPUTES, REDUCTIONS
from cost_models.schedules import SCHEDULES

_ALIASES = {"mbs": "micro_batch", "z": "zero", "swap": "swap_optimizer", "offload": "activation_offload"}
_CHOICES: dict[str, tuple[str, ...]] = {
    "cp_kind": CP_KINDS,
    "schedule": SCHEDULES,
    "recompute": RECOMPUTES,
    "reduce_gradients": REDUCTIONS,
    "placement": PLACEMENTS,
}
_FLAGS = ("sp", "swap_optimizer", "activation_offload")
_NUMBERS = ("tp", "cp", "ep", "pp", "vpp", "dp", "dp_shard", "zero", "micro_batch", "accumulation", "recompute_layers")
_TRUTH = {"1": 1, "true": 1, "on": 1, "yes": 1, "0": 0, "false": 0, "off": 0, "no": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the search may choose from; `fixed` and `most` map a column of Layouts to its code."""

    fixed: tuple[tuple[str, int], ...] = ()
    most: tuple[tuple[str, int], ...] = ()

    def allows(self, name: str, value: int) -> bool:
        """Whether a column may take this value."""
        fixed, most = dict(self.fixed), dict(self.most)
        return fixed.get(name, value) == value and value <= most.get(name, value)

    def keep(self, name: str, values: list[int]) -> list[int]:
        """The values that are allowed."""
        return [value for value in values if self.allows(name, value)]

    def words(self) -> tuple[dict[str, int | str], dict[str, int | str]]:
        """What is fixed and what is bounded, as a user writes it."""
        fixed, most = (
            {name: _CHOICES[name][value] if name in _CHOICES else value for name, value in pairs}
            for pairs in (self.fixed, self.most)
        )
        return fixed, most

    def value_of(self, name: str) -> int | None:
        """The value a column is fixed to."""
        return dict(self.fixed).get(name)


def parse_bounds(fix: tuple[str, ...], most: tuple[str, ...]) -> Bounds:
    """Bounds from `name=value` texts, several to a text with commas; C650 for what is no bound."""
    fixed = _once("--fix", fix)
    highest = _once("--max", most)
    for name, value in fixed.items():
        if value > highest.get(name, value):
            raise TitanPlanError(
                "C650", f"--fix {name}={value} is above --max {name}={highest[name]}", "drop one of them"
            )
    for name in highest:
        if name not in _NUMBERS:
            raise TitanPlanError("C650", f"--max {name} is not a number", f"--max takes {', '.join(_NUMBERS)}")
    return Bounds(fixed=tuple(fixed.items()), most=tuple(highest.items()))


def _once(option: str, texts: tuple[str, ...]) -> dict[str, int]:
    """All bounds of an option; one that is given twice with two values is refused."""
    found: dict[str, int] = {}
    for name, value in (pair for text in texts for pair in _pairs(option, text)):
        if found.setdefault(name, value) != value:
            raise TitanPlanError("C650", f"{option} gives {name} twice, {found[name]} and {value}", "drop one of them")
    return found


def check_devices(bounds: Bounds, n_devices: int) -> None:
    """Refuse fixed degrees that cannot multiply to the devices, with the arithmetic."""
    degrees = {name: value for name, value in bounds.fixed if name in {"tp", "cp", "pp", "dp"}}
    product = math.prod(degrees.values())
    whole = len(degrees) == 4
    if (product != n_devices) if whole else n_devices % product:
        told = " x ".join(f"{name} {value}" for name, value in degrees.items())
        relation = "is not" if whole else "does not divide"
        raise TitanPlanError(
            "C650",
            f"--fix {told} = {product} {relation} the {n_devices} devices",
            f"divisors of {n_devices}: {', '.join(str(d) for d in range(1, n_devices + 1) if n_devices % d == 0)}",
        )


def _pairs(option: str, text: str) -> list[tuple[str, int]]:
    pairs: list[tuple[str, int]] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        raw_name, equals, raw_value = (piece.strip() for piece in part.partition("="))
        if not equals or not raw_value:
            raise TitanPlanError("C650", f"{option} {part!r} has no value", f"write it as {option} tp=4,pp=4")
        pairs += _values(option, raw_name.lower().replace("-", "_"), raw_value.lower())
    if not pairs:
        raise TitanPlanError("C650", f"{option} is empty", f"write it as {option} tp=4,pp=4")
    return pairs


def _values(option: str, raw_name: str, value: str) -> list[tuple[str, int]]:
    name = _ALIASES.get(raw_name, raw_name)
    known = (*_NUMBERS, *_FLAGS, *_CHOICES, *_ALIASES)
    if name not in known:
        near = difflib.get_close_matches(raw_name, known, 1)
        raise TitanPlanError(
            "C650",
            f"{option} does not know {raw_name!r}",
            f"did you mean {near[0]}?" if near else f"one of: {', '.join(known)}",
        )
    if name == "recompute" and value.startswith("layers="):
        return [("recompute", RECOMPUTES.index("full")), ("recompute_layers", _number(option, name, value[7:]))]
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise TitanPlanError("C650", f"{option} {name}={value}", f"one of: {', '.join(_CHOICES[name])}")
        return [(name, _CHOICES[name].index(value))]
    if name in _FLAGS:
        if value not in _TRUTH:
            raise TitanPlanError("C650", f"{option} {name}={value}", "on or off")
        return [(name, _TRUTH[value])]
    return [(name, _number(option, name, value))]


def _number(option: str, name: str, value: str) -> int:
    lowest = 0 if name == "zero" else 1
    if not value.isascii() or not value.isdigit() or len(value) > 10 or not lowest <= int(value) <= 10**9:
        raise TitanPlanError("C650", f"{option} {name}={value[:40]}", f"a whole number from {lowest} to 10**9")
    return int(value)
