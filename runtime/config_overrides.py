"""`--set a.b=c`: values that go before those of the file."""

from __future__ import annotations

from collections.abc import Mapping

from cost_models.errors import TitanPlanError
from cost_models.model_files import show
from cost_models.yaml_files import parse_yaml

from .config_values import Overrides

_EXAMPLE = "write it as section.key=value, such as training.lr=1e-4"


def with_overrides(values: Mapping[str, object], overrides: Overrides) -> dict[str, object]:
    """A copy of the file's content with the overrides in it; the given one stays as it is."""
    result = dict(values)
    items = overrides.items() if isinstance(overrides, Mapping) else map(_split, overrides)
    for key, value in items:
        parts = key.split(".")
        if not all(parts):
            raise TitanPlanError("C616", f"{key!r} is not a dotted key", _EXAMPLE)
        parsed = parse_yaml(value, f"--set {key}") if isinstance(value, str) else value
        _put(result, parts, parsed, key)
    return result


def _split(item: str) -> tuple[str, object]:
    key, sign, value = item.partition("=")
    if not sign:
        raise TitanPlanError("C616", f"--set {item!r} has no value", _EXAMPLE)
    return key.strip(), value


def _put(values: dict[str, object], parts: list[str], value: object, key: str) -> None:
    """Set one nested value; the sections on the way are copied, not changed."""
    head, *rest = parts
    if not rest:
        values[head] = value
        return
    inner = values.get(head)
    if inner is not None and not isinstance(inner, Mapping):
        raise TitanPlanError("C616", f"--set {key}: {head} is {show(inner)}, it has no keys", f"set {head} as a whole")
    section = {str(name): kept for name, kept in inner.items()} if inner else {}
    _put(section, rest, value, key)
    values[head] = section
