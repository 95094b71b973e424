"""Data parallelism: one protocol, two ways. ZeRO-0 replicates, ZeRO-1 to 3 shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from .replicated import BUCKET_BYTES, Copies, Replicated, replicated_whole
from .sharded import Sharded
from .torch_private import sharded_placements
from .trainable import Swapping, Trainable, Whole

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from runtime.config_values import CommunicationOptions
    from runtime.models.decoder import Decoder
    from runtime.models.roles import Role

    from .groups import Groups
    from .weight_gradients import WeightGradients

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class DataParallel(Protocol):
    """One model chunk's gradients and weights over data-parallel ranks.

    A step: `begin_step`, then for each micro batch forward, `before_backward`, backward (and, where weight gradients
    were deferred, `after_weights`), then `finish` and the optimizer on `trainables`.
    """

    trainables: tuple[Trainable, ...]

    def begin_step(self) -> None: ...  # noqa: D102

    def before_backward(self, *, last: bool, split: bool = False) -> None: ...  # noqa: D102

    def after_weights(self, *, last: bool) -> None: ...  # noqa: D102

    def finish(self) -> None: ...  # noqa: D102


def data_parallel(
    module: Decoder,
    roles: dict[str, Role],
    groups: Groups | None,
    options: CommunicationOptions,
    *,
    zero: int,
    every: bool,
    precision: str,
    gradients: WeightGradients,
    swap: Swapping | None = None,
) -> DataParallel:
    """Data parallelism of a chunk as the layout asks; `groups` is None for a single process."""
    dtype = DTYPES[precision]
    places = _Places(groups)
    if zero == 0:
        return Replicated(
            module,
            roles,
            Copies(whole=places.replicated, group=places.group, count=places.copies),
            dtype=dtype,
            gradients=gradients,
            bucket_bytes=BUCKET_BYTES if options.fuse_gradient else 1,
            asynchronous=options.async_allreduce,
            swap=swap,
        )
    assert groups is not None  # noqa: S101 - ZeRO over one rank is refused by D212
    return Sharded(
        module,
        roles,
        dense=groups.dense["replicate", "shard"],
        experts=groups.experts["replicate", "shard"],
        zero=zero,
        every=every,
        dtype=dtype,
        whole=places.sharded,
        copies=places.copies,
        fused=options.fuse_gradient,
        asynchronous=options.async_allreduce,
        swap=swap,
    )


class _Places:
    """Where parameters lie on the meshes of the groups."""

    def __init__(self, groups: Groups | None) -> None:
        self._groups = groups

    def _mesh(self, role: Role) -> DeviceMesh | None:
        if self._groups is None:
            return None
        spread = role.expert and self._groups.layout.ep > 1
        return (
            self._groups.experts["replicate", "shard", "ep"]
            if spread
            else self._groups.dense["replicate", "shard", "tp"]
        )

    def _cuts(self, role: Role) -> int:
        if self._groups is None:
            return 1
        layout = self._groups.layout
        return layout.ep if role.expert and layout.ep > 1 else layout.tp

    def replicated(self, parameter: nn.Parameter, role: Role) -> Whole:
        """Under ZeRO-0."""
        mesh = self._mesh(role)
        if mesh is None:
            return Whole(shape=tuple(parameter.shape), mesh=None, placements=())
        return replicated_whole(parameter, role, self._cuts(role), mesh)

    def sharded(self, shape: torch.Size, role: Role, axis: int) -> Whole:
        """Under ZeRO-1 to 3: `shape` is what one tp or ep rank holds."""
        whole = list(shape)
        if role.cut is not None:
            whole[role.cut] *= self._cuts(role)
        placements = sharded_placements(role.cut, self._cuts(role), axis)
        return Whole(shape=tuple(whole), mesh=self._mesh(role), placements=placements)

    def group(self, role: Role) -> dist.ProcessGroup | None:
        """Ranks that hold copies under ZeRO-0."""
        mesh = self._mesh(role)
        return None if mesh is None or mesh.size(0) == 1 else mesh.get_group("replicate")

    def copies(self, role: Role) -> int:
        """Ranks of the world that hold the same part."""
        mesh = self._mesh(role)
        if mesh is None:
            return 1
        return mesh.size(0) * (mesh.size(2) if role.cut is None and not role.expert else 1)


__all__ = ["DTYPES", "DataParallel", "data_parallel"]
