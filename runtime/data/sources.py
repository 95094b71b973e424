"""What `training.dataset` names: the built-in demo, files on disk, or a data set of the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cost_models.errors import TitanPlanError
from cost_models.yaml_numbers import cut, plain

from .complaints import reason

if TYPE_CHECKING:
    from runtime.config_values import DatasetOptions

DEMO: Final = "demo"
KINDS: Final = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".npy": "tokens",
}
_PACKED: Final = ("text", "jsonl")
_ENDINGS: Final = ".txt, .jsonl, .ndjson (each also with .gz), .parquet, .arrow, .npy"
THREE_WAYS: Final = (
    "three ways to give data: `dataset: demo` (built in); `dataset: {path: FILE_OR_FOLDER}` on this machine; "
    "`dataset: hf:ORG/NAME` (downloaded by the datasets library)"
)
_REMOTE: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB: Final = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of documents or tokens.

    Attributes:
        path: where it is.
        name: the path below the folder that the user named, the same on every machine.
        kind: a value of `KINDS`.
    """

    path: Path
    name: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The built-in corpus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Files of this machine, in the order in which they are read.

    Attributes:
        root: what the user named.
        files: at least one.
    """

    root: Path
    files: tuple[DataFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """The `train` split of a data set of the Hugging Face Hub; an empty config or revision is the Hub's default."""

    name: str
    config: str = ""
    revision: str = ""


Source = Demo | Files | Remote


def find_source(options: DatasetOptions) -> Source:
    """Resolve the name or path; nothing is read but folders, nothing is downloaded.

    Raises:
        TitanPlanError: C620 nothing has this name; C621 it holds no data; C622, C603 it cannot be read.
    """
    if options.path:
        path = user_path(options.path)
        if not _exists(path):
            raise TitanPlanError("C620", f"training.dataset.path: {_looked(options.path)}", THREE_WAYS)
        return _files(path)
    if options.name == DEMO:
        return Demo()
    return _named(options.name)


def _named(name: str) -> Source:
    if name.startswith("hf:"):
        match = _HUB.fullmatch(name.removeprefix("hf:"))
        if match is None:
            hint = "its form is hf:ORG/NAME, with :CONFIG and @REVISION where needed"
            raise TitanPlanError(
                "C620", f"training.dataset.name: {cut(name, 200)!r} names no data set of the Hub", hint
            )
        return Remote(**{key: value or "" for key, value in match.groupdict().items()})
    path = user_path(name)
    if name and _exists(path):
        return _files(path)
    if _looks_remote(name):
        return Remote(name=name)
    looked = _looked(name) if name else "is empty"
    raise TitanPlanError("C620", f"training.dataset.name: {looked}, and none is built in", THREE_WAYS)


def _looks_remote(name: str) -> bool:
    """`org/name`; a path mistyped below a folder that is here, or with the ending of a data file, must never go out."""
    if _REMOTE.fullmatch(name) is None or _kind(name) is not None:
        return False
    return not _exists(Path(name.partition("/")[0]))


def _looked(path: str) -> str:
    where = "" if user_path(path).is_absolute() else f" in {Path.cwd()}"
    return f"there is no file or folder {plain(path)}{where}"


def user_path(text: str) -> Path:
    """A path of a config file: relative to the working directory, `~` is the home folder where there is one."""
    return Path(os.path.expanduser(text))


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except PermissionError as error:
        hint = "check the rights of the folders above it"
        raise TitanPlanError("C603", f"{path}: cannot be reached ({reason(error)})", hint) from None
    except (OSError, ValueError):  # ValueError: a null byte
        return False
    return True


def _kind(name: str) -> str | None:
    lower = name.lower()
    kind = KINDS.get(Path(lower.removesuffix(".gz")).suffix)
    return None if lower.endswith(".gz") and kind not in _PACKED else kind


def _files(path: Path) -> Files:
    if not path.is_dir():
        kind = _kind(path.name)
        if kind is None or not path.is_file():
            hint = f"its ending tells how a file is read: {_ENDINGS}"
            raise TitanPlanError("C621", f"{path}: data of this kind cannot be read", hint)
        return Files(root=path, files=(DataFile(path=path, name=path.name, kind=kind),))
    try:
        files = tuple(_below(path, "", {os.path.realpath(path)}))
    except RecursionError:
        hint = "name a folder further below"
        raise TitanPlanError("C621", f"{path}: hundreds of folders inside each other", hint) from None
    if not files:
        raise TitanPlanError("C621", f"{path}: the folder holds no data", f"files that are read: {_ENDINGS}")
    return Files(root=path, files=files)


def _below(folder: Path, prefix: str, seen: set[str]) -> Iterator[DataFile]:
    """Data files below a folder, sorted; each folder once, so links in a circle end."""
    names = _list(folder)
    if {"state.json", "dataset_info.json"} <= set(names):
        yield from _saved(folder, prefix)
        return
    if "dataset_dict.json" in names:
        _check_train(folder, names)
        names = ["train"]
    for name in names:
        path = folder / name
        mode = _mode(path, _kind(name) is not None)
        if stat.S_ISDIR(mode) and (real := os.path.realpath(path)) not in seen:
            seen.add(real)
            yield from _below(path, f"{prefix}{name}/", seen)
        kind = _kind(name)
        if stat.S_ISREG(mode) and kind is not None:
            yield DataFile(path=path, name=prefix + name, kind=kind)


def _list(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        hint = "check its rights"
        raise TitanPlanError("C603", f"{folder}: the folder cannot be read ({reason(error)})", hint) from None


def _mode(path: Path, needed: bool) -> int:
    """Kind of a file; 0 for what is broken and would not be read anyway."""
    try:
        return path.stat().st_mode
    except OSError as error:
        if not needed:
            return 0
        hint = "mend or remove it: the run would silently train on less"
        raise TitanPlanError("C603", f"{path}: cannot be read ({reason(error)})", hint) from None


def _saved(folder: Path, prefix: str) -> Iterator[DataFile]:
    """Files of `datasets.Dataset.save_to_disk`, in its order: state.json lists them."""
    state = folder / "state.json"
    try:
        names = [str(item["filename"]) for item in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        hint = "save the data set again with save_to_disk"
        raise TitanPlanError("C622", f"{state}: does not list the files of the data set", hint) from None
    for name in names:
        path = folder / name
        if not path.is_file():
            hint = "copy the folder as a whole"
            raise TitanPlanError("C622", f"{folder}: state.json lists {name}, which is not there", hint)
        yield DataFile(path=path, name=prefix + name, kind="arrow")


def _check_train(folder: Path, names: list[str]) -> None:
    if "train" not in names:
        splits = ", ".join(name for name in names if (folder / name).is_dir()) or "none"
        hint = "set training.dataset.path to the folder of the split to train on"
        raise TitanPlanError("C621", f"{folder}: a saved data set without the split train; splits: {splits}", hint)
