"""The section `model` of config.yaml: a model of the catalogue, of a config.json, or by its dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Final

from cost_models.catalog import find_model, find_model_by_size, list_models, model_names, spelling_key
from cost_models.errors import TitanPlanError
from cost_models.hf_config import load_hf_config
from cost_models.model import ModelSpec
from cost_models.model_files import ModelEntry, dump_model, parse_model, show, text
from cost_models.yaml_numbers import nearest_hint

_DIMENSIONS: Final = tuple(field.name for field in fields(ModelSpec) if field.name != "name")
_KEYS: Final = ("name", "size", "hf_config", *_DIMENSIONS)
_SIZES: Final = ("hidden_dim", "n_layers", "n_heads", "ffn_dim", "vocab_size")
"""With these a model needs no catalogue; the others have defaults or follow."""


def read_model(values: object, origin: str, folder: Path) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model of the section, and what the section changes about its catalogue model or config.json.

    Args:
        values: the section.
        origin: the file, as complaints should name it.
        folder: where a relative `hf_config` is looked up first.
    """
    given = _given(values, origin)
    dimensions = {key: value for key, value in given.items() if key in _DIMENSIONS}
    base = _base(given, origin, folder)
    if base is None:
        label = text(given.get("name", "custom"), f"{origin}: model.name")
        return parse_model({"name": label, **_present(dimensions)}, f"{origin}: model"), ()
    merged = _merged(base, dimensions)
    model = parse_model({"name": base.name, **merged}, f"{origin}: model")
    return model, _changes(base, model)


def model_section(model: ModelSpec) -> dict[str, object]:
    """The section that `read_model` reads back to an equal model."""
    entry = _entry(model.name, "")
    if entry is None:
        return {**dump_model(model), "name": model.name}
    names = {"name": entry.family, "size": entry.size} if entry.size else {"name": entry.name}
    dimensions = dump_model(model) if model == entry.spec else asdict(model)
    return {**names, **{key: value for key, value in dimensions.items() if key != "name"}}


def _given(values: object, origin: str) -> dict[str, object]:
    if not values:
        hint = "give model: {name: LLaMA, size: 70B}, dimensions, or hf_config"
        raise TitanPlanError("C608", f"{origin}: section model is missing", hint)
    if not isinstance(values, Mapping):
        raise TitanPlanError("C606", f"{origin}: model is {show(values)}", "`key: value` lines are needed")
    given = {str(key): value for key, value in values.items()}
    for key in given:
        if key not in _KEYS:
            raise TitanPlanError("C605", f"{origin}: unknown key model.{key}", nearest_hint(key, _KEYS))
    # An empty `moe:` or `mla:` takes the experts or the latent away; any other empty key is as if not given.
    return {key: value for key, value in given.items() if value is not None or key in {"moe", "mla"}}


def _present(dimensions: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in dimensions.items() if value is not None}


def _base(given: Mapping[str, object], origin: str, folder: Path) -> ModelSpec | None:
    """The model that the section starts from; None where it describes one on its own."""
    if "hf_config" in given:
        _refuse_both(given, origin)
        path = Path(text(given["hf_config"], f"{origin}: model.hf_config")).expanduser()
        return load_hf_config(folder / path if (folder / path).exists() else path)
    name = text(given.get("name", ""), f"{origin}: model.name")
    size = text(given.get("size", ""), f"{origin}: model.size")
    complete = all(key in given for key in _SIZES)
    entry = _entry(name, size) if name.strip() else None
    if entry is not None:
        return entry.spec
    if complete or not (name.strip() or size.strip()):
        return None
    try:
        return find_model_by_size(name, size) if name.strip() else find_model(size)
    except TitanPlanError as error:
        missing = ", ".join(key for key in _SIZES if key not in given)
        hint = f"{error.hint}; or describe it: {missing} missing" if error.code == "C601" else error.hint
        raise TitanPlanError(error.code, f"{origin}: model: {error.message}", hint) from None


def _refuse_both(given: Mapping[str, object], origin: str) -> None:
    named = [key for key in ("name", "size") if key in given]
    if named:
        message = f"{origin}: model has hf_config beside {' and '.join(named)}"
        raise TitanPlanError("C615", message, "keep the one that says which model is meant")


def _entry(name: str, size: str) -> ModelEntry | None:
    """The catalogue's entry of this name, never a path: a name beside all dimensions is only a label."""
    wanted = {spelling_key(f"{name}-{size}")} if size.strip() else {spelling_key(name)}
    for entry in list_models():
        keys = {spelling_key(known) for known in model_names(entry)}
        if keys & wanted or (spelling_key(name) in keys and spelling_key(size) == spelling_key(entry.size)):
            return entry
    return None


def _merged(base: ModelSpec, dimensions: Mapping[str, object]) -> dict[str, object]:
    """The base's values with the given ones in place; what the base derived from a changed value is derived again."""
    known: dict[str, object] = {key: value for key, value in asdict(base).items() if key != "name"}
    for key, value in dimensions.items():
        inner = known[key]
        known[key] = {**inner, **value} if isinstance(inner, dict) and isinstance(value, Mapping) else value
    if base.n_kv_heads == base.n_heads and "n_kv_heads" not in dimensions:
        del known["n_kv_heads"]
    if base.head_dim * base.n_heads == base.hidden_dim and "head_dim" not in dimensions:
        del known["head_dim"]
    return known


def _changes(base: ModelSpec, model: ModelSpec) -> tuple[str, ...]:
    return tuple(
        f"model.{key} {getattr(model, key)} instead of {getattr(base, key)} of {base.name}"
        for key in _DIMENSIONS
        if getattr(model, key) != getattr(base, key)
    )
