"""From a TrainConfig to the model chunks of this rank: built, cut, sharded, scheduled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from runtime.compiling import compile_layers
from runtime.memory.host import to_host
from runtime.memory.offload import HostStore
from runtime.models.attention_kernels import kernel_for
from runtime.models.building import Build, StepScale, counted
from runtime.models.decoder import Chunk, Decoder
from runtime.models.initial import first_values
from runtime.models.roles import role_of
from runtime.models.rotary import RotaryTable
from runtime.parallel.context import ContextParallel
from runtime.parallel.data import DTYPES, data_parallel
from runtime.parallel.groups import Groups
from runtime.parallel.pipeline import ChunkStage, Pipeline
from runtime.parallel.tensor import TensorParallel
from runtime.parallel.weight_gradients import WeightGradients

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from cost_models.layout import Layout
    from cost_models.model import ModelSpec
    from runtime.config_values import TrainConfig
    from runtime.device import TrainDevice
    from runtime.models.attention_kernels import AttentionKernel
    from runtime.models.roles import Role
    from runtime.parallel.data import DataParallel
    from runtime.parallel.trainable import Trainable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltChunk:
    """One model chunk and who keeps its gradients."""

    module: Decoder
    data: DataParallel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assembly:
    """All that this rank trains.

    Attributes:
        scale: the factors of the step's losses; the trainer sets them.
        pipeline: None for pp 1.
        positions: of a sequence, which this rank reads, in its order.
    """

    chunks: tuple[BuiltChunk, ...]
    groups: Groups | None
    scale: StepScale
    pipeline: Pipeline | None
    positions: Tensor

    @property
    def trainables(self) -> tuple[Trainable, ...]:
        """Parts of all parameters that this rank updates."""
        return tuple(t for chunk in self.chunks for t in chunk.data.trainables)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StandIns:
    """What a run without other ranks and without numbers puts in the place of the real thing.

    Attributes:
        row_counts: reads how many rows go to each expert or rank.
    """

    groups: Groups | None
    kernel: AttentionKernel
    row_counts: Callable[[Tensor, int], list[int]] = counted

    @classmethod
    def real(cls, config: TrainConfig, device: TrainDevice) -> StandIns:
        """The real thing; opens the process groups."""
        return cls(groups=open_groups(config, device.kind), kernel=kernel_for(device.kind))


def open_groups(config: TrainConfig, kind: str) -> Groups | None:
    """The communicators of this process; None where it is alone."""
    layout = config.layout
    return None if layout.devices == 1 else Groups(layout, kind, experts=config.model.moe is not None)


def assemble(config: TrainConfig, device: TrainDevice, stand_ins: StandIns | None = None) -> Assembly:
    """Build this rank's part of the model. The process group is there unless the world is one process."""
    layout = config.layout
    stand_ins = stand_ins or StandIns.real(config, device)
    groups = stand_ins.groups
    scale = StepScale()
    stages = (0,) if layout.pp == 1 else layout.stages_on(groups.at.pp if groups else 0)
    build = _build(config, stand_ins, device, scale)
    builds = {stage: _of_chunk(build) for stage in stages}
    chunks = tuple(_chunk(config, groups, device, builds[stage], stage) for stage in stages)
    pipeline = _pipeline(config, groups, device, chunks, builds, stages) if layout.pp > 1 else None
    return Assembly(
        chunks=chunks,
        groups=groups,
        scale=scale,
        pipeline=pipeline,
        positions=_context(layout, groups).positions(config.workload.seq_len),
    )


def _context(layout: Layout, groups: Groups | None) -> ContextParallel:
    if groups is None or layout.cp == 1:
        return ContextParallel()
    return ContextParallel(layout.cp_kind, groups.cp, groups.at.cp, layout.cp)


def _build(config: TrainConfig, given: StandIns, device: TrainDevice, scale: StepScale) -> Build:
    """What all chunks of a rank share: one store of offloaded activations holds what is on its way for all of them."""
    layout, model, groups = config.layout, config.model, given.groups
    tp = TensorParallel()
    if groups is not None and layout.tp > 1:
        tp = TensorParallel(groups.tp, groups.at.tp, layout.tp, layout.sp)
    cp = _context(layout, groups)
    positions = cp.positions(config.workload.seq_len).to(device.torch_device)
    own = positions.chunk(layout.tp)[tp.rank] if layout.sp else positions
    return Build(
        tp=tp,
        cp=cp,
        ep=groups.ep if groups else None,
        ep_size=layout.ep,
        sequence=groups.sequence if groups else None,
        micro_batch=layout.micro_batch,
        kernel=given.kernel,
        row_counts=given.row_counts,
        scale=scale,
        host=HostStore(device) if layout.activation_offload else None,
        selective=layout.recompute == "selective",
        rotary=_rotary(model, cp, config.workload.seq_len, device.torch_device),
        positions=own,
        slopes=_slopes(model, tp, cp, device.torch_device),
    )


def _of_chunk(build: Build) -> Build:
    """Each chunk has a store of weight gradients of its own."""
    return replace(build, tp=replace(build.tp, gradients=WeightGradients()))


def _rotary(model: ModelSpec, cp: ContextParallel, seq_len: int, device: torch.device) -> RotaryTable | None:
    if model.position != "rope":
        return None
    width = model.mla.qk_rope_head_dim if model.mla else model.head_dim
    return RotaryTable(cp.positions(seq_len).to(device), width, model.rope_theta)


def _slopes(model: ModelSpec, tp: TensorParallel, cp: ContextParallel, device: torch.device) -> Tensor | None:
    """ALiBi's geometric slopes (Press et al. 2021, arXiv:2108.12409, section 3), those of this rank's heads."""
    if model.position != "alibi":
        return None
    power = 1 << (model.n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(model.n_heads - power)]
    own = torch.tensor(slopes, device=device).chunk(tp.size)[tp.rank]
    return own.chunk(cp.size)[cp.rank] if cp.kind == "ulysses" else own


def _chunk(config: TrainConfig, groups: Groups | None, device: TrainDevice, build: Build, stage: int) -> BuiltChunk:
    layout, model = config.layout, config.model
    with torch.device("meta"):
        module = Decoder(model, chunk_of(layout, model, stage), build)
    roles = {name: role_of(name, model, layout) for name, _ in module.named_parameters()}
    materialise(module, config, roles, groups, device.torch_device)
    if config.numerics.compile:
        compile_layers(module, device.kind)
    assert build.tp.gradients is not None  # noqa: S101 - `_build` made it
    data = data_parallel(
        module,
        roles,
        groups,
        config.communication,
        zero=layout.zero,
        every=layout.reduce_gradients == "every",
        precision=config.workload.precision,
        gradients=build.tp.gradients,
        swap=(lambda x: to_host(x, device)) if layout.swap_optimizer else None,
    )
    return BuiltChunk(module=module, data=data)


def chunk_of(layout: Layout, model: ModelSpec, stage: int) -> Chunk:
    """Which part of the model a virtual stage holds."""
    layers = layout.stage_layers(model.n_layers)
    start = sum(layers[:stage])
    recomputed = 0
    if layout.recompute == "full":
        recomputed = layout.recompute_layers or layers[stage]
    return Chunk(
        layers=range(start, start + layers[stage]),
        first=stage == 0,
        last=stage == len(layers) - 1,
        recomputed=recomputed,
    )


def materialise(
    module: Decoder, config: TrainConfig, roles: dict[str, Role], groups: Groups | None, device: torch.device
) -> None:
    """Give a chunk on the meta device its first values."""
    tied = config.model.tied_embeddings
    for name, parameter in list(module.named_parameters()):
        # The head of a tied embedding on another stage is a copy of the embedding.
        source = "embedding.weight" if tied and name == "head.weight" else name
        values = _values(source, parameter.shape, config, roles[name], groups, device)
        owner, _, attribute = name.rpartition(".")
        fresh = nn.Parameter(values, requires_grad=parameter.requires_grad)
        setattr(module.get_submodule(owner), attribute, fresh)
        if tied and name == "embedding.weight" and module.head is not None:
            module.head.weight = fresh


def _values(
    name: str, local: torch.Size, config: TrainConfig, role: Role, groups: Groups | None, device: torch.device
) -> Tensor:
    layout, seed, model = config.layout, config.training.seed, config.model
    if ".experts." in name:
        return _expert_values(name, local, config, role, groups, device)
    shape, rank = list(local), groups.at.tp if groups else 0
    if role.cut is None:
        return first_values(name, tuple(shape), model, seed, device, lambda whole: whole)
    axis = role.cut
    shape[axis] = config.model.vocab_size if name in {"embedding.weight", "head.weight"} else shape[axis] * layout.tp
    return first_values(name, tuple(shape), model, seed, device, lambda w: _part(w, axis, rank, local[axis]))


def _part(whole: Tensor, axis: int, rank: int, length: int) -> Tensor:
    """A rank's rows or columns; rows behind the real vocabulary are zero."""
    start = min(rank * length, whole.shape[axis])
    part = whole.narrow(axis, start, min(length, whole.shape[axis] - start))
    if part.shape[axis] == length:
        return part.clone(memory_format=torch.contiguous_format)
    padding = [0, 0] * (whole.ndim - axis - 1) + [0, length - part.shape[axis]]
    return nn.functional.pad(part, padding)


def _expert_values(
    name: str, local: torch.Size, config: TrainConfig, role: Role, groups: Groups | None, device: torch.device
) -> Tensor:
    """Each expert has a seed of its own, so that ep ranks make only theirs."""
    layout = config.layout
    spread = layout.ep > 1 and groups is not None
    first = groups.experts.get_local_rank("ep") * local[0] if spread and groups is not None else 0
    tp_rank = groups.at.tp if groups else 0
    axis = None if role.cut is None or spread else role.cut - 1
    shape = list(local[1:])
    if axis is not None:
        shape[axis] *= layout.tp
    take = (lambda w: w) if axis is None else (lambda w: _part(w, axis, tp_rank, local[1:][axis]))
    make = [
        first_values(f"{name}.{first + i}", tuple(shape), config.model, config.training.seed, device, take)
        for i in range(local[0])
    ]
    return torch.stack(make)


def _pipeline(
    config: TrainConfig,
    groups: Groups | None,
    device: TrainDevice,
    chunks: tuple[BuiltChunk, ...],
    builds: dict[int, Build],
    stages: tuple[int, ...],
) -> Pipeline:
    assert groups is not None  # noqa: S101 - a pipeline has ranks
    assert groups.pp is not None  # noqa: S101
    layout = config.layout
    tokens = layout.micro_batch * config.workload.seq_len // layout.cp
    own = tokens // layout.tp if layout.sp else tokens
    dtype = DTYPES[config.workload.precision]
    boundary = torch.empty(own, config.model.hidden_dim, dtype=dtype, device=device.torch_device, requires_grad=True)
    ids = torch.empty(1, tokens, dtype=torch.int64, device=device.torch_device)
    made = []
    for chunk, stage in zip(chunks, stages, strict=True):
        store = builds[stage].tp.gradients
        assert store is not None  # noqa: S101
        made.append(ChunkStage(chunk.module, chunk.data, store, layout, stage, boundary, groups.pp, ids))
    return Pipeline(made, layout)
