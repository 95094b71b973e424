"""Tensors to and from the disk by torch.distributed.checkpoint (DCP), each in parts by their place in the whole.

DCP's planners for DTensor are not used: a part says its place itself, so that padding of the vocabulary never reaches
the disk, and each part is written by one rank. DCP's `.metadata` is a pickle that torch 2.13 opens with a plain
`pickle.load`; here only the few classes that it is made of may come out. Tensors are read with `weights_only`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from cost_models.errors import TitanPlanError

from .error_texts import shorten_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.distributed.checkpoint.planner import ReadItem

    from .checkpoint_ranks import Ranks

_ALLOWED: Final = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A box of a whole tensor.

    Attributes:
        key: of the whole tensor; several parts of one rank may lie in the same one.
        shape: of the whole tensor.
        offset: of the part's first element.
        tensor: the part; it is written, or read into.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box in DCP's words."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=self.tensor.shape)


def file_of(rank: int) -> str:
    """The file that DCP's FileSystemWriter gives a rank."""
    return f"__{rank}_0.distcp"


def write_parts(parts: Iterable[Part], folder: Path, ranks: Ranks) -> None:
    """Write the parts of all ranks; the files are on the disk when this returns. Parts of one key fill it."""
    writer, planner = FileSystemWriter(folder), _SavePlanner(parts)
    whole: list[Metadata] = []

    def local() -> SavePlan:
        writer.set_up_storage_writer(ranks.leads, rank=ranks.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def together(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        whole.append(metadata)
        return writer.prepare_global_plan(plans)

    def finish(written: list[Any]) -> list[None]:
        writer.finish(whole[0], written)
        return [None] * ranks.size

    plan = ranks.collect(local, together)
    ranks.collect(lambda: writer.write_data(planner.finish_plan(plan), planner).value(), finish)


def read_parts(parts: Iterable[Part], folder: Path, ranks: Ranks) -> None:
    """Fill the parts of all ranks.

    Raises:
        TitanPlanError: R754 where the checkpoint cannot be read on some rank.
    """

    def read() -> None:
        reader = _Reader(folder)
        try:
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, ranks.leads, rank=ranks.rank, use_collectives=True)
            planner = _LoadPlanner(parts, metadata)
            reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:  # a torn or forged file raises anything
            reason = shorten_text(str(error)) or type(error).__name__
            raise unreadable(folder, f"{reason} (rank {ranks.rank})") from error

    ranks.collect(read, lambda _: [None] * ranks.size)


def unreadable(folder: Path, reason: str) -> TitanPlanError:
    """The error of a checkpoint that cannot be read."""
    hint = f"remove or rename {folder}; training then resumes from the checkpoint before it"
    return TitanPlanError("R754", f"checkpoint {folder} cannot be read: {reason}", hint)


class _SavePlanner(DefaultSavePlanner):
    """Of DCP's own planner the checks remain: parts of a key must fill it and not overlap."""

    def __init__(self, parts: Iterable[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {part.key: part for part in parts}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(part) for part in self._parts.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn].tensor


def _write_item(part: Part) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(part.key, part.offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=part.chunk,
            properties=TensorProperties(dtype=part.tensor.dtype),
            size=torch.Size(part.shape),
        ),
    )


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, parts: Iterable[Part], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.metadata = metadata
        self._parts: dict[str, list[Part]] = {}
        for part in parts:
            self._parts.setdefault(part.key, []).append(part)

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, parts in self._parts.items():
            saved = self.metadata.state_dict_metadata.get(key) if self.metadata else None
            if not isinstance(saved, TensorStorageMetadata):
                raise ValueError(f"{key} is missing")  # noqa: TRY004 - of the file, not of a caller
            for part in parts:
                if tuple(saved.size) != part.shape:
                    raise ValueError(f"{key} is {tuple(saved.size)}, {part.shape} is needed")
            items += create_read_items_for_chunk_list(key, saved, [part.chunk for part in parts])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn][index.index or 0].tensor


class _Reader(FileSystemReader):
    def read_metadata(self, *_args: object, **_kwargs: object) -> Metadata:
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(".metadata holds something else")
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(f".metadata points to {info.relative_path}")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as in the base class
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f".metadata asks for {module}.{name}")
