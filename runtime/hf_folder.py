"""A folder of Hugging Face weights: is it the model of the run, and which file holds which tensor. No torch.

Names, shapes and number formats stand in the heads of the files, so all that can be wrong with them is found before any
process group starts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cost_models.errors import TitanPlanError
from cost_models.hf_config import hf_notes, parse_hf_config
from cost_models.yaml_files import read_text

from .hf_names import FAMILIES, HfFamily, hf_tensors, unsupported, whole_shapes

if TYPE_CHECKING:
    from cost_models.model import ModelSpec

INCOMPLETE: Final = "C661"
OTHER_MODEL: Final = "C662"
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
_LONGEST_HEAD: Final = 100_000_000
"""The bound of the format itself, 100 MB."""
_SHOWN: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFolder:
    """Weights that fit the model.

    Attributes:
        files: the file of each tensor.
        notes: what the folder's config.json asks for that the trainer does not do.
    """

    folder: Path
    family: HfFamily
    files: Mapping[str, Path]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]


def check_hf(folder: str | Path, model: ModelSpec) -> HfFolder:
    """Find the weights of a model in a folder and check them against it.

    Args:
        folder: holds config.json, and model.safetensors or its parts with their index.

    Raises:
        TitanPlanError: C603 to C608 what is no config.json; C660 an architecture that is not covered; C661 missing or
            damaged files or tensors; C662 weights of another model, with what differs.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        message = f"training.checkpoint.load: {folder} is no folder"
        raise TitanPlanError(INCOMPLETE, message, "give the folder that holds config.json and *.safetensors")
    values = _json(folder / "config.json")
    family = _family(values, folder)
    _compare(parse_hf_config(values, str(folder / "config.json")), model, folder)
    tensors = _tensors(folder)
    _check_tensors(tensors, family, model, folder)
    files = {name: tensor.file for name, tensor in tensors.items()}
    return HfFolder(folder=folder, family=family, files=files, notes=hf_notes(values))


def _json(path: Path) -> Mapping[str, Any]:
    text = read_text(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TitanPlanError("C604", f"{path}: {error}", "mend the JSON") from None
    if not isinstance(values, Mapping):
        raise TitanPlanError("C606", f"{path} is no JSON object", "download the file again")
    return values


def _family(values: Mapping[str, Any], folder: Path) -> HfFamily:
    """The family that the folder names; what would compute something else than our decoder is refused."""
    kind = values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise unsupported(f"{folder}/config.json: weights of model_type {kind!r} cannot be read")
    wanted: dict[str, tuple[object, object]] = {
        "hidden_act": ("silu", "silu"),
        "partial_rotary_factor": (1.0, 1.0),
        "quantization_config": (None, None),
    }
    if family.experts == "qwen":
        wanted["norm_topk_prob"] = (True, False)  # both classes of transformers have false where the key is missing
    for key, (right, default) in wanted.items():
        value = values.get(key)
        if (default if value is None else value) != right:
            shown = "missing" if value is None else f"{value!r:.60}"
            message = f"{folder}/config.json: {key} is {shown}, the trainer computes with {right!r}"
            raise unsupported(message)
    return family


def _compare(found: ModelSpec, model: ModelSpec, folder: Path) -> None:
    ours, theirs = asdict(model), asdict(found)
    skipped = {"name", "seq_len", "positions"}
    if model.moe is not None and not model.dense_layers:
        skipped.add("ffn_dim")  # no layer has it
    lines = [
        f"{key} {_short(theirs[key])} there, {_short(ours[key])} here"
        for key in ours
        if key not in skipped and theirs[key] != ours[key]
    ]
    if lines:
        message = f"{folder}/config.json describes another model than {model.name}: {'; '.join(lines)}"
        raise TitanPlanError(OTHER_MODEL, message, f"model: {{hf_config: {folder}/config.json}} trains that one")


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _tensors(folder: Path) -> dict[str, _Tensor]:
    """All tensors of the folder's files."""
    index = folder / INDEX_FILE
    if not index.is_file():
        single = folder / SINGLE_FILE
        if not single.is_file():
            message = f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}"
            raise TitanPlanError(
                INCOMPLETE, message, "PyTorch's *.bin files are not read: they can run code; convert them"
            )
        return _head(single)
    placed = _json(index).get("weight_map")
    if not isinstance(placed, Mapping) or not all(_plain_name(file) for file in placed.values()):
        raise TitanPlanError(
            INCOMPLETE, f"{index}: weight_map is no map of tensors to files beside it", "download again"
        )
    found: dict[str, _Tensor] = {}
    for file in sorted(set(placed.values())):
        found |= _head(folder / file)
    return found


def _plain_name(file: object) -> bool:
    return isinstance(file, str) and file == Path(file).name


def _head(path: Path) -> dict[str, _Tensor]:
    """Read what a file says about itself (format: length, JSON, bytes of the tensors)."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            head: dict[str, Any] = json.loads(file.read(min(length, _LONGEST_HEAD)))
        size = path.stat().st_size - 8 - length
        tensors = {
            name: _Tensor(file=path, dtype=value["dtype"], shape=tuple(value["shape"]))
            for name, value in head.items()
            if name != "__metadata__"
        }
        whole = all(value["data_offsets"][1] <= size for name, value in head.items() if name != "__metadata__")
    except OSError as error:
        raise TitanPlanError(INCOMPLETE, f"{path}: {error.strerror or error}", "download it again") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error, RecursionError):
        raise TitanPlanError(INCOMPLETE, f"{path} is no safetensors file", "download it again") from None
    if not whole:
        raise TitanPlanError(INCOMPLETE, f"{path} ends before its last tensor", "download it again")
    return tensors


def _check_tensors(tensors: Mapping[str, _Tensor], family: HfFamily, model: ModelSpec, folder: Path) -> None:
    wanted = _wanted(family, model)
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise TitanPlanError(INCOMPLETE, f"{folder} lacks {_some(missing)}", "download the missing files")
    wrong = [
        f"{name} {tensors[name].shape} instead of {shape}"
        for name, shape in wanted.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise TitanPlanError(OTHER_MODEL, f"{folder}: {_some(wrong)}", "config.json and weights are of two models")
    packed = [f"{name} ({tensors[name].dtype})" for name in wanted if tensors[name].dtype not in _FLOATS]
    if packed:
        raise unsupported(f"{folder}: {_some(packed)}: weights must be one of {', '.join(_FLOATS)}")


def _wanted(family: HfFamily, model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model needs, with its shape."""
    experts = model.moe.experts if model.moe else 0
    wanted: dict[str, tuple[int, ...]] = {}
    for name, shape in whole_shapes(model).items():
        tensors = hf_tensors(name, family, experts)
        wanted |= dict.fromkeys(tensors.names, shape[1:] if tensors.stacked else shape)
    return wanted


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
