"""Model files: YAML text to ModelSpec, with complaints that name file, key, what was got and what would do."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

from cost_models.errors import TitanPlanError
from cost_models.model import MlaSpec, ModelSpec, MoeSpec
from cost_models.yaml_files import read_yaml
from cost_models.yaml_numbers import plain, shorten

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

ENTRY_KEYS: Final = ("family", "size", "aliases", "published_parameters", "source")
"""Keys of a catalogue file beside those of ModelSpec."""

_Reader = Callable[[object, str], object]
"""Turns a value of a file into a value of a field; the text names the place in complaints."""

_Spec = TypeVar("_Spec", bound=ModelSpec | MoeSpec | MlaSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model of the catalogue.

    Attributes:
        family: with `size`, a second way to name the model (llama2, 70B).
        aliases: further names; no two models share one.
        published_parameters: the exact number that `source` gives; None where only rounded ones exist.
    """

    name: str
    family: str
    size: str
    aliases: tuple[str, ...]
    spec: ModelSpec
    published_parameters: int | None
    source: str


def load_model_file(path: Path) -> ModelSpec:
    """Read a model from a YAML file."""
    return parse_model(read_yaml(path), str(path))


def load_entry(path: Path | Traversable) -> ModelEntry:
    """Read a file of the catalogue."""
    return parse_entry(read_yaml(path), str(path))


def parse_model(values: object, origin: str) -> ModelSpec:
    """Check the keys and types of a model file's content and build the ModelSpec.

    `name` defaults to the file's name, `n_kv_heads` to `n_heads`, `head_dim` to hidden_dim / n_heads.

    Args:
        values: what the file holds.
        origin: the file, as complaints should name it.
    """
    mapping = _as_mapping(values, origin, "a model file")
    mapping = {key: value for key, value in mapping.items() if key not in ENTRY_KEYS}
    mapping.setdefault("name", Path(origin).stem)
    if "n_heads" in mapping:
        mapping.setdefault("n_kv_heads", mapping["n_heads"])
    if "head_dim" not in mapping:
        _add_head_dim(mapping, origin)
    return _build(ModelSpec, mapping, origin)


def parse_entry(values: object, origin: str) -> ModelEntry:
    """Check and build one entry of the catalogue."""
    mapping = _as_mapping(values, origin, "a model file")
    spec = parse_model(mapping, origin)
    published = mapping.get("published_parameters")
    source = text(mapping.get("source", ""), f"{origin}: source")
    if published is not None and not source:
        raise TitanPlanError("C608", f"{origin}: published_parameters has no source", "name where the number stands")
    return ModelEntry(
        name=spec.name,
        family=text(mapping.get("family", spec.name), f"{origin}: family"),
        size=text(mapping.get("size", ""), f"{origin}: size"),
        aliases=_texts(mapping.get("aliases") or [], f"{origin}: aliases"),
        spec=spec,
        published_parameters=None if published is None else whole_number(published, f"{origin}: published_parameters"),
        source=source,
    )


def dump_model(spec: ModelSpec) -> dict[str, object]:
    """Give the content of a model file; `parse_model` reads it back to an equal ModelSpec."""
    return _dump(spec)


def whole_number(value: object, what: str) -> int:
    """Read a whole number; YAML 1.1 takes `1e4` for text, so text that spells a number counts as one."""
    number = _number(value)
    if number is None or (isinstance(number, float) and not number.is_integer()):
        raise TitanPlanError("C606", f"{what} is {show(value)}, a whole number is needed", "such as 4096")
    return int(number)


def real_number(value: object, what: str) -> float:
    """Read a finite number; text that spells one (`1e-4` is text in YAML 1.1) counts."""
    number = _number(value)
    if number is None or not -_FINITE <= number <= _FINITE:
        raise TitanPlanError("C606", f"{what} is {show(value)}, a number is needed", "such as 1e-4")
    return float(number)


def flag(value: object, what: str) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise TitanPlanError("C606", f"{what} is {show(value)}, true or false is needed", "write it without quotes")
    return value


def text(value: object, what: str) -> str:
    """Read text; a whole number counts, as in `size: 7`."""
    if isinstance(value, bool | float) or not isinstance(value, str | int):
        raise TitanPlanError("C606", f"{what} is {show(value)}, text is needed", "put it in quotes")
    return str(value)


def show(value: object) -> str:
    """Spell a value in a complaint, shortened, with its kind."""
    return "empty" if value is None else f"{shorten(value)} ({_KINDS.get(type(value), type(value).__name__)})"


_FINITE: Final = sys.float_info.max
_KINDS: Final[dict[type, str]] = {str: "text", int: "number", float: "number", bool: "flag", list: "list", dict: "map"}


def _as_mapping(values: object, origin: str, what: str) -> dict[str, object]:
    if not isinstance(values, Mapping):
        raise TitanPlanError("C606", f"{origin}: {what} needs `key: value` lines, got {show(values)}", "see tiny.yaml")
    return {str(key): value for key, value in values.items()}


def _add_head_dim(mapping: dict[str, object], origin: str) -> None:
    """Derive head_dim; wrong or missing sizes are left for `_build` to name."""
    hidden, heads = _size(mapping.get("hidden_dim")), _size(mapping.get("n_heads"))
    if not hidden or not heads:
        mapping["head_dim"] = 1
    elif hidden % heads:
        message = f"{origin}: head_dim is missing and hidden_dim {hidden} / n_heads {heads} is no whole number"
        raise TitanPlanError("C608", message, "give head_dim")
    else:
        mapping["head_dim"] = hidden // heads


def _size(value: object) -> int:
    """The whole number that a value is or spells; 0 for what is none, or none that could be a size."""
    number = _number(value)
    return int(number) if number is not None and 0 < number < 10**9 and number == int(number) else 0


def _number(value: object) -> float | int | None:
    """The number that a value is or spells, else None; whole ones stay exact."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    for kind in (int, float):
        try:
            return kind(value) if isinstance(value, str) else value
        except ValueError:
            continue
    return None


def _texts(value: object, what: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TitanPlanError("C606", f"{what} is {show(value)}, a list is needed", "such as [70B, llama-70b]")
    return tuple(text(item, what) for item in value)


def _choice(options: tuple[str, ...], value: object, what: str) -> str:
    if value not in options:
        raise TitanPlanError("C611", f"{what} is {show(value)}", f"one of {', '.join(options)} is needed")
    return str(value)


def _build(spec_type: type[_Spec], mapping: Mapping[str, object], origin: str, prefix: str = "") -> _Spec:
    """Convert every key by the type of its field; `prefix` is the path to a nested section, such as `moe.`."""
    readers = _READERS[spec_type]
    for key in mapping:
        if key not in readers:
            _refuse_key(key, prefix, origin, (*readers, *(() if prefix else ENTRY_KEYS)))
    missing = [f"{prefix}{name}" for name in _required(spec_type) if name not in mapping]
    if missing:
        raise TitanPlanError("C608", f"{origin}: {', '.join(missing)} missing", "a model file needs every size")
    values: dict[str, Any] = {key: readers[key](value, f"{origin}: {prefix}{key}") for key, value in mapping.items()}
    try:
        return spec_type(**values)
    except TitanPlanError as error:
        raise TitanPlanError(error.code, f"{origin}: {prefix}{error.message}", error.hint) from None


def _refuse_key(key: str, prefix: str, origin: str, known: tuple[str, ...]) -> None:
    # The search is quadratic in the length; no key of ours is as long as that.
    near = difflib.get_close_matches(key, known, 1, 0.5) if len(key) <= 80 else []
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(known)}"
    raise TitanPlanError("C605", f"{origin}: unknown key {prefix}{plain(key)}", hint)


def _required(spec_type: type[_Spec]) -> list[str]:
    return [field.name for field in fields(spec_type) if field.default is MISSING]


def _readers(spec_type: type[Any]) -> dict[str, _Reader]:
    """How the value of each field is read, from the field's type."""
    hints = get_type_hints(spec_type)
    return {field.name: _reader(field, hints[field.name]) for field in fields(spec_type)}


def _reader(field: Field[Any], hint: object) -> _Reader:
    if get_origin(hint) is Literal:
        return partial(_choice, get_args(hint))
    simple: dict[object, _Reader] = {int: whole_number, float: real_number, bool: flag, str: text}
    if hint in simple:
        return simple[hint]
    nested = next(part for part in get_args(hint) if part is not NoneType)
    return partial(_nested, nested, f"{field.name}.")


def _nested(spec_type: type[_Spec], prefix: str, value: object, what: str) -> _Spec | None:
    origin = what.rsplit(": ", 1)[0]
    return None if value is None else _build(spec_type, _as_mapping(value, what, "this section"), origin, prefix)


def _dump(spec: ModelSpec | MoeSpec | MlaSpec) -> dict[str, object]:
    values = {field.name: getattr(spec, field.name) for field in fields(spec) if _differs(spec, field)}
    return {key: _dump(value) if isinstance(value, MoeSpec | MlaSpec) else value for key, value in values.items()}


def _differs(spec: ModelSpec | MoeSpec | MlaSpec, field: Field[Any]) -> bool:
    return field.default is MISSING or getattr(spec, field.name) != field.default


_READERS: Final[dict[type, dict[str, _Reader]]] = {kind: _readers(kind) for kind in (ModelSpec, MoeSpec, MlaSpec)}
