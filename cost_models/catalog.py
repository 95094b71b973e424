"""Names, aliases and paths to ModelSpec and ClusterSpec.

Spellings are matched without case, and `-`, `_`, space and dot do not count, except between two digits, where they
keep Qwen2.5-1.5B apart from a Qwen2.5-15B and Qwen2.5-7B from Qwen2-57B; there any of them does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

from cost_models.cluster import ClusterSpec
from cost_models.cluster_files import cluster_index, load_cluster_file, load_shipped_cluster, read_shipped_clusters
from cost_models.errors import TitanPlanError
from cost_models.hf_config import load_hf_config
from cost_models.model import ModelSpec
from cost_models.model_files import ModelEntry, load_entry, load_model_file
from cost_models.resources import configs_dir

_FILE_SUFFIXES: Final = (".yaml", ".yml", ".json")
_SUGGESTIONS: Final = 3


def find_model(name: str) -> ModelSpec:
    """Find a model by catalogue name, alias, or path.

    A path is a model file (YAML), a Hugging Face `config.json`, or a folder that holds one. A name of the catalogue
    goes before a folder of that name; write `./NAME` for the folder.
    """
    entry = _model_index().get(spelling_key(name))
    if entry is not None:
        return entry.spec
    if not _names_a_path(name):
        raise TitanPlanError("C601", f"unknown model {name[:80]!r}", _model_hint(name))
    path = _path(name)
    if path.is_dir() or path.suffix.lower() == ".json":
        return load_hf_config(path)
    return load_model_file(path)


def find_model_by_size(family: str, size: str) -> ModelSpec:
    """Find a model by family and size, such as LLaMA and 70B; an empty size leaves the family to name the model."""
    if not size.strip():
        return find_model(family)
    entry = _model_index().get(spelling_key(f"{family}-{size}"))
    if entry is not None:
        return entry.spec
    whole = _model_index().get(spelling_key(family))  # name: meta-llama/Llama-2-70b-hf, size: 70B
    if whole is not None and spelling_key(whole.size) == spelling_key(size):
        return whole.spec
    raise TitanPlanError("C601", f"unknown model: family {family!r}, size {size!r}", _size_hint(family, size))


@cache
def list_models() -> tuple[ModelEntry, ...]:
    """Every model of the catalogue, by family and number of parameters."""
    files = [file for file in configs_dir().joinpath("models").iterdir() if file.name.endswith(".yaml")]
    return tuple(sorted(map(load_entry, files), key=lambda entry: (entry.family, entry.spec.total_params, entry.name)))


def model_names(entry: ModelEntry) -> tuple[str, ...]:
    """Every name that an entry answers to.

    Beside name and aliases: family with size, both with the family's dots left out (llama31-8b), and of an alias
    ORGANISATION/NAME the NAME alone.
    """
    names = [entry.name, *entry.aliases]
    if entry.size:
        names.append(f"{entry.family}-{entry.size}")
        names.append(f"{entry.family.replace('.', '')}-{entry.size}")
    return (*names, *(name.rpartition("/")[2] for name in entry.aliases if "/" in name))


def find_cluster(name_or_path: str) -> ClusterSpec:
    """Find a cluster by catalogue name, alias, or path of a cluster file (YAML)."""
    name = _cluster_index().get(spelling_key(name_or_path))
    if name is not None:
        return load_shipped_cluster(name)
    if not _names_a_path(name_or_path):
        index = _cluster_index()
        hint = _hint([index[key] for key in _nearest(name_or_path, index)], "titan-plan clusters")
        raise TitanPlanError("C602", f"unknown cluster {name_or_path[:80]!r}", hint)
    return load_cluster_file(_path(name_or_path))


def list_clusters() -> tuple[ClusterSpec, ...]:
    """Every cluster of the catalogue, by name."""
    return tuple(cluster for _, cluster in sorted(read_shipped_clusters().items()))


def spelling_key(name: str) -> str:
    """What two spellings of one name have in common."""
    dotted = re.sub(r"(?<=\d)[-_.\s]+(?=\d)", ".", name.strip().casefold())
    return re.sub(r"(?<!\d)[-_.\s]+|[-_.\s]+(?!\d)", "", dotted)


def _names_a_path(name: str) -> bool:
    """A name is a path where it ends or starts like one, or where such a file or folder exists."""
    if name.lower().endswith(_FILE_SUFFIXES) or name.startswith(("./", "../", "/", "~")):
        return True
    try:
        return bool(name.strip()) and Path(name).exists()
    except (OSError, ValueError):  # longer than a path may be; a null byte
        return False


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~somebody who does not exist
        return Path(name)


@cache
def _model_index() -> dict[str, ModelEntry]:
    return {spelling_key(name): entry for entry in list_models() for name in model_names(entry)}


@cache
def _cluster_index() -> dict[str, str]:
    return {spelling_key(name): name for name in cluster_index()}


def _model_hint(name: str) -> str:
    index = _model_index()
    same_size = [entry.name for entry in list_models() if spelling_key(entry.size) == spelling_key(name)]
    return _hint([*same_size, *(index[key].name for key in _nearest(name, index))], "titan-plan models")


def _size_hint(family: str, size: str) -> str:
    key = spelling_key(family)
    sizes = [entry.size for entry in list_models() if spelling_key(entry.family) == key and entry.size]
    if sizes:
        return f"{family} comes in {', '.join(sizes)}; `titan-plan models` lists all"
    return _model_hint(f"{family}-{size}")


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(spelling_key(name), list(known), _SUGGESTIONS)


def _hint(near: Iterable[str], command: str) -> str:
    names = list(dict.fromkeys(near))[:_SUGGESTIONS]
    return f"nearest: {', '.join(names)}; `{command}` lists all" if names else f"`{command}` lists all"
