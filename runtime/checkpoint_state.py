"""The state of training as parts of whole tensors, with keys and places that no layout enters.

`model.<parameter>` and `optimizer.<parameter>.<state>`; the vocabulary has its real length, without the rows that make
it divisible by tp. What several ranks hold is written by one of them, and they take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from runtime.memory.host import to_host
from runtime.parallel.slices import part_slices

from .checkpoint_record import state_names
from .checkpoint_storage import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from runtime.parallel.trainable import Trainable, Whole

    from .assembly import Assembly
    from .config_values import TrainConfig
    from .device import TrainDevice
    from .engine import Engine

_TABLE: Final = "embedding.weight"
_BY_VOCABULARY: Final = (_TABLE, "head.weight")
_ROUTER_BIAS: Final = "router.bias"
# Kinds of placement that cut an axis, by name: torch's _StridedShard is no Shard.
_CUTS: Final = ("Shard", "_StridedShard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Where a rank's part lies in the whole."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


def box_of(whole: Whole, at: Sequence[int], sizes: Sequence[int]) -> Box:
    """The box of a rank.

    Args:
        at: its coordinates in the mesh.
        sizes: of the mesh.
    """
    found = part_slices(whole.shape, sizes, whole.placements, at)
    return Box(offset=tuple(s.start for s in found), size=tuple(s.stop - s.start for s in found))


def turn_of(whole: Whole, at: Sequence[int], sizes: Sequence[int], index: int) -> bool:
    """Whether of the ranks with the same part this one writes it."""
    copies, mine = 1, 0
    for place, rank, ranks in zip(whole.placements, at, sizes, strict=True):
        if type(place).__name__ not in _CUTS:
            copies, mine = copies * ranks, mine * ranks + rank
    return index % copies == mine


class TrainingState:
    """What this rank writes, and what it reads into."""

    def __init__(self, config: TrainConfig, engine: Engine, assembly: Assembly, device: TrainDevice) -> None:
        self._config, self._engine, self._assembly, self._device = config, engine, assembly, device

    def staged(self) -> tuple[list[Part], int]:
        """Copies in host memory of what this rank writes, and the updates that its optimizer has made.

        Training may go on as soon as this returns: nothing is shared with it, on a CPU neither.
        """
        self._device.synchronize()  # swapped state may still be on its way to the host
        states = self._engine.optimizer.state()
        parts = [self._copy(part) for part in self._own(states)]
        self._device.synchronize()
        return parts, _updates(states)

    def _copy(self, part: Part) -> Part:
        return Part(key=part.key, shape=part.shape, offset=part.offset, tensor=to_host(part.tensor, self._device))

    def _own(self, states: dict[str, dict[str, Tensor]]) -> Iterator[Part]:
        names = state_names(self._config.workload.optimizer)
        for index, trainable in enumerate(self._engine.trainables):
            if trainable.borrowed or not turn_of(trainable.whole, *_place(trainable.whole), index):
                continue
            yield from self._part(f"model.{trainable.name}", trainable, trainable.weight)
            state = states.get(trainable.name, {})
            for name in names:
                if name in state:
                    yield from self._part(f"optimizer.{trainable.name}.{name}", trainable, state[name])
        if self._leads_stage():
            yield from self._biases()

    def restore(self, optimizer_steps: int) -> tuple[list[Part], dict[str, dict[str, Tensor]]]:
        """Parts to read into, and the optimizer's state that some of them fill.

        Weights and biases are read in place; state is new, on the host where it is swapped.
        """
        parts: list[Part] = list(self._biases())
        states: dict[str, dict[str, Tensor]] = {}
        for trainable in self._engine.trainables:
            source = _TABLE if trainable.borrowed else trainable.name
            parts += self._part(f"model.{source}", trainable, trainable.weight)
            if not optimizer_steps:
                continue
            states[trainable.name] = state = self._new_state(trainable.weight)
            for name, tensor in state.items():
                parts += self._part(f"optimizer.{source}.{name}", trainable, tensor)
            if self._config.workload.optimizer != "sgd":
                # The fused kernels want the count beside the gradient, also where weight and moments rest on the host.
                state["step"] = torch.tensor(float(optimizer_steps), device=self._device.torch_device)
        return parts, states

    def _new_state(self, weight: Tensor) -> dict[str, Tensor]:
        device = torch.device("cpu") if self._config.layout.swap_optimizer else weight.device
        names = state_names(self._config.workload.optimizer)
        return {name: torch.zeros_like(weight, device=device) for name in names}

    def _part(self, key: str, trainable: Trainable, tensor: Tensor) -> Iterator[Part]:
        """The part without the padding of the vocabulary; none where nothing is left."""
        whole = trainable.whole
        box = box_of(whole, *_place(whole))
        if box.size != tuple(tensor.shape):
            raise RuntimeError(f"{key}: this rank holds {tuple(tensor.shape)}, its place in the whole is {box.size}")
        shape = list(whole.shape)
        if trainable.name in _BY_VOCABULARY:
            shape[0] = min(shape[0], self._config.model.vocab_size)
            real = max(min(box.size[0], shape[0] - box.offset[0]), 0)
            tensor = tensor.narrow(0, 0, real)
        if tensor.numel():
            yield Part(key=key, shape=tuple(shape), offset=box.offset, tensor=tensor)

    def _biases(self) -> Iterator[Part]:
        for chunk in self._assembly.chunks:
            for name, buffer in chunk.module.named_buffers():
                if name.endswith(_ROUTER_BIAS):
                    yield Part(key=f"model.{name}", shape=tuple(buffer.shape), offset=(0,) * buffer.ndim, tensor=buffer)

    def _leads_stage(self) -> bool:
        """Router biases are alike on all ranks of a stage."""
        groups = self._assembly.groups
        return groups is None or (groups.at.dp, groups.at.cp, groups.at.tp) == (0, 0, 0)


def _place(whole: Whole) -> tuple[Sequence[int], Sequence[int]]:
    """This rank's coordinates in the mesh, and the mesh's sizes."""
    if whole.mesh is None:
        return (), ()
    at = whole.mesh.get_coordinate()
    assert at is not None  # noqa: S101 - a rank is in the meshes of its own parameters
    return at, whole.mesh.shape


def _updates(states: dict[str, dict[str, Tensor]]) -> int:
    """Updates so far; of an optimizer that does not count them, 1 where it has state."""
    for state in states.values():
        return int(state["step"].item()) if "step" in state else 1
    return 0
