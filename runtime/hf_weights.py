"""Hugging Face weights into the parameters of a run: each rank reads the slices that it holds, whatever the layout."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from .hf_folder import HfFolder, check_hf
from .hf_names import HfTensors, hf_tensors
from .parallel.slices import local_slices

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from .config_values import TrainConfig
    from .parallel.trainable import Trainable

__all__ = ["HfFolder", "check_hf", "load_hf"]


def load_hf(folder: str | Path, config: TrainConfig, trainables: Iterable[Trainable]) -> HfFolder:
    """Fill this rank's full-precision parts and let the model compute with them.

    Every rank reads for itself; no collective runs. The optimizer's state is left as it is.

    Args:
        trainables: those of the engine.

    Returns:
        Where the weights came from; its notes belong in the log.

    Raises:
        TitanPlanError: see `check_hf`.
    """
    import torch

    from .parallel.trainable import publish

    held = list(trainables)
    source = check_hf(folder, config.model)
    experts = config.model.moe.experts if config.model.moe else 0
    with ExitStack() as open_files, torch.no_grad():
        files = _Files(source, open_files)
        for trainable in held:
            name = _source_name(trainable.name, tied=config.model.tied_embeddings)
            tensors = hf_tensors(name, source.family, experts)
            _fill(trainable, _where(trainable), _Source(files, tensors), config.model.vocab_size)
        publish(held)
    return source


class _Files:
    """Files that stay open, mapped into memory, until all is read."""

    def __init__(self, source: HfFolder, stack: ExitStack) -> None:
        self._source, self._stack = source, stack
        self._open: dict[Path, Any] = {}

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """One slice of a tensor, in the file's number format."""
        from safetensors import safe_open

        path = self._source.files[name]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        part: Tensor = self._open[path].get_slice(name)[where]
        return part


class _Source(NamedTuple):
    files: _Files
    tensors: HfTensors

    def copy(self, part: Tensor, where: tuple[slice, ...]) -> None:
        """Read into `part`, expert by expert where ours is a stack."""
        if not self.tensors.stacked:
            part.copy_(self.files.read(self.tensors.names[0], where))
            return
        for place, expert in enumerate(self.tensors.names[where[0]]):
            part[place].copy_(self.files.read(expert, where[1:]))


def _source_name(name: str, *, tied: bool) -> str:
    """A tied head on a pipeline stage of its own is a copy of the embedding."""
    return "embedding.weight" if tied and name == "head.weight" else name


def _where(trainable: Trainable) -> tuple[slice, ...]:
    mesh = trainable.whole.mesh
    return local_slices(trainable.whole, None if mesh is None else mesh.get_coordinate())


def _fill(trainable: Trainable, where: tuple[slice, ...], source: _Source, vocabulary: int) -> None:
    part = trainable.weight
    lengths = tuple(w.stop - w.start for w in where)
    if part.shape != lengths and part.numel():
        raise AssertionError(f"{trainable.name}: {tuple(part.shape)} on this rank, {lengths} by its placements")
    if trainable.name in {"embedding.weight", "head.weight"}:
        # Rows behind the vocabulary fill up the last tp rank; the files have none.
        start, stop = (min(bound, vocabulary) for bound in (where[0].start, where[0].stop))
        part[stop - start :].zero_()
        part, where = part[: stop - start], (slice(start, stop), *where[1:])
    if part.numel():
        source.copy(part, where)
