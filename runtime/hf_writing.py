"""A checkpoint of ours to a folder that `AutoModelForCausalLM.from_pretrained` reads: parts of at most 5 GB, an index.

One of our tensors is in memory at a time, beside the part that is being written. The folder appears when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from cost_models.errors import TitanPlanError

from .checkpoint_record import RECORD, Record, model_differences, read_record
from .hf_config_writing import hf_config
from .hf_folder import INDEX_FILE, SINGLE_FILE
from .hf_names import HfFamily, family_of, hf_tensors, whole_shapes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from cost_models.model import ModelSpec

    from .config_values import TrainConfig

UNUSABLE: Final = "C663"
TARGET: Final = "C664"
PART_BYTES: Final = 5 * 10**9
_BYTES: Final = {"bf16": 2, "fp32": 4}


class HfPiece(NamedTuple):
    """One tensor of the files: our parameter, or one expert of it."""

    name: str
    ours: str
    expert: int | None
    n_values: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written."""

    folder: Path
    family: HfFamily
    total_bytes: int
    files: tuple[str, ...]


def export_hf(
    checkpoint: Path, config: TrainConfig, out: Path, dtype: str = "bf16", *, part_bytes: int = PART_BYTES
) -> Written:
    """Write the model of a checkpoint for transformers.

    Args:
        checkpoint: folder of one step.
        out: must not exist, or be empty.
        dtype: `bf16` or `fp32`.

    Raises:
        TitanPlanError: C660 a model that transformers does not have, C663 a checkpoint that cannot be read or is of
            another model, C664 a target that cannot be written.
    """
    model, family = config.model, family_of(config.model)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TitanPlanError(TARGET, f"{out} is there already", "choose a new folder, or remove it first")
    source = _Checkpoint(checkpoint, model, whole_shapes(model))
    experts = model.moe.experts if model.moe else 0
    parts = parts_of(_pieces(whole_shapes(model), family, experts), _BYTES[dtype], part_bytes)
    names = _file_names(len(parts))
    partial = out.parent / f".{out.name}.{os.getpid()}.partial"
    total = sum(piece.n_values for part in parts for piece in part) * _BYTES[dtype]
    try:
        partial.mkdir(parents=True)
        for name, part in zip(names, parts, strict=True):
            _write_part(partial / name, part, source, dtype)
        if len(names) > 1:
            placed = {piece.name: name for name, part in zip(names, parts, strict=True) for piece in part}
            _write_json(partial / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": placed})
        longest = max(config.workload.seq_len, model.seq_len)
        torch_name = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
        _write_json(partial / "config.json", hf_config(model, family, seq_len=longest, dtype=torch_name))
        partial.rename(out)
    except OSError as error:
        raise TitanPlanError(TARGET, f"{out}: {error.strerror or error}", "free space, or another folder") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Written(folder=out, family=family, total_bytes=total, files=names)


def _pieces(shapes: dict[str, tuple[int, ...]], family: HfFamily, experts: int) -> Iterator[HfPiece]:
    """All tensors in the order of the model, experts of one stack side by side."""
    for ours, shape in shapes.items():
        values = 1
        for length in shape:
            values *= length
        tensors = hf_tensors(ours, family, experts)
        for place, name in enumerate(tensors.names):
            yield HfPiece(name, ours, place if tensors.stacked else None, values // len(tensors.names))


def parts_of(pieces: Iterator[HfPiece], value_bytes: int, most: int) -> list[list[HfPiece]]:
    """Cut into files of at most `most` bytes; a larger tensor gets a file of its own."""
    parts: list[list[HfPiece]] = [[]]
    filled = 0
    for piece in pieces:
        size = piece.n_values * value_bytes
        if parts[-1] and filled + size > most:
            parts.append([])
            filled = 0
        parts[-1].append(piece)
        filled += size
    return parts


def _file_names(count: int) -> tuple[str, ...]:
    if count == 1:
        return (SINGLE_FILE,)
    return tuple(f"model-{place:05d}-of-{count:05d}.safetensors" for place in range(1, count + 1))


def _write_part(path: Path, part: Sequence[HfPiece], source: _Checkpoint, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    target = torch.bfloat16 if dtype == "bf16" else torch.float32
    # Copies: tensors that share memory are refused, and so are views.
    tensors = {piece.name: source.read(piece).to(target, copy=True).contiguous() for piece in part}
    save_file(tensors, path, metadata={"format": "pt"})


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


class _Checkpoint:
    """One step of ours. The last parameter read stays: a stack of experts is taken apart without reading it again.

    Args:
        shapes: of the parameters that the model has.
    """

    def __init__(self, folder: Path, model: ModelSpec, shapes: dict[str, tuple[int, ...]]) -> None:
        self._folder, self._shapes = folder, shapes
        self._last: tuple[str, Tensor] | None = None
        different = model_differences(_record(folder).model, asdict(model))
        if different:
            message = f"checkpoint {folder} is of another model: {'; '.join(different)}"
            raise TitanPlanError(UNUSABLE, message, "give the config.yaml that it was trained with")

    def read(self, piece: HfPiece) -> Tensor:
        """One tensor of the files, in full precision."""
        if self._last is None or self._last[0] != piece.ours:
            self._last = None  # its memory goes before the next comes
            self._last = (piece.ours, self._whole(piece.ours))
        whole = self._last[1]
        return whole if piece.expert is None else whole[piece.expert]

    def _whole(self, name: str) -> Tensor:
        import torch

        from .checkpoint_ranks import Ranks
        from .checkpoint_storage import Part, read_parts

        shape = self._shapes[name]
        tensor = torch.empty(shape, dtype=torch.float32)
        part = Part(key=f"model.{name}", shape=shape, offset=(0,) * len(shape), tensor=tensor)
        try:
            read_parts([part], self._folder, Ranks(alone=True))
        except TitanPlanError as error:
            raise TitanPlanError(UNUSABLE, error.message, "export another step") from None
        return tensor


def _record(folder: Path) -> Record:
    try:
        return read_record(folder / RECORD)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"{folder} is no whole checkpoint: {RECORD}: {reason}"
        raise TitanPlanError(UNUSABLE, message, "give a folder step-XXXXXXXX that training finished writing") from None
