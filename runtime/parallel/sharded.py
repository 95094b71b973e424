"""ZeRO-1, 2 and 3 by torch's FSDP2: full-precision shards, low-precision weights gathered for use.

ZeRO-1 and 2 gather the updated weights once a step and keep them until the last backward; ZeRO-3 gathers each layer
for every forward and backward. Gradients are sharded as they are reduced, under ZeRO-1 too: keeping them whole gains
nothing. Under pipeline or accumulation they are reduced after the last micro batch, or after every one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.placement_types import Shard

from cost_models.rank_shards import shard_axis

from .torch_private import accumulate_gradients, initialise, keep_gradients_wide, local_part, reduce_gradients
from .trainable import Swapping, Trainable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from runtime.models.decoder import Decoder
    from runtime.models.roles import Role

    from .trainable import Whole


class Sharded:
    """One model chunk under FSDP2. See `runtime.parallel.data.DataParallel` for the protocol.

    Args:
        module: parameters in full precision, those of this tp and ep rank.
        dense, experts: (replicate, shard) meshes.
        whole: where a sharded parameter lies.
    """

    def __init__(
        self,
        module: Decoder,
        roles: dict[str, Role],
        *,
        dense: DeviceMesh,
        experts: DeviceMesh,
        zero: int,
        every: bool,
        dtype: torch.dtype,
        whole: Callable[[torch.Size, Role, int], Whole],
        copies: Callable[[Role], int],
        fused: bool = True,
        asynchronous: bool = True,
        swap: Swapping | None = None,
    ) -> None:
        self._zero, self._every, self._asynchronous = zero, every, asynchronous
        self._synced = False
        shapes = {n: p.shape for n, p in module.named_parameters()}
        axes: dict[str, int] = {}
        names = {id(p): n for n, p in module.named_parameters()}
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 or swap else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )

        def shard(part: nn.Module, mesh: DeviceMesh, *, reshard: bool) -> None:
            size = mesh.size(-1)

            def axis(parameter: nn.Parameter) -> Shard:
                found = shard_axis(parameter.shape, size)
                axes[names[id(parameter)]] = found
                return Shard(found)

            usable = mesh if mesh.size(0) > 1 else mesh["shard"]
            fully_shard(part, mesh=usable, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=axis)

        main = _swapped_out(module, roles, dense, experts, dtype, swap) if swap and dtype != torch.float32 else {}
        for part, is_expert in _units(module, fused=fused):
            # Without a pipeline the head's backward follows its forward at once.
            stays = part is module.head and module.chunk.first
            shard(part, experts if is_expert else dense, reshard=zero == 3 and not stays)
        shard(module, dense, reshard=False)
        self._root = cast("FSDPModule", module)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                # Sums, not means: the loss is divided by the tokens of the global batch. gloo has no premultiplied sum.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        if isinstance(module.embedding, FSDPModule) and module.embedding.norm is None:
            module.embedding.set_unshard_in_backward(False)  # a look-up's gradient needs no table
        first = _first_through(module)
        if first is not None:
            # Backward gathers ahead the unit whose forward came just before: for the first of a chunk that would be the
            # last one of another micro batch, in vain. With itself named, it gathers nothing.
            first.set_modules_to_backward_prefetch([first])
        initialise(self._root)
        if main:
            keep_gradients_wide(self._root)
        self._parameters = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.trainables = tuple(
            Trainable(
                name=n,
                role=roles[n],
                weight=main.get(n, local_part(p)),
                gradient=lambda p=p: _gradient(p),  # type: ignore[misc]
                copies=copies(roles[n]),
                whole=whole(shapes[n], roles[n], axes[n]),
                low=local_part(p) if main else None,
            )
            for n, p in self._parameters
        )

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        for _, parameter in self._parameters:
            parameter.grad = None
        self._synced = False

    def before_backward(self, *, last: bool, split: bool = False) -> None:
        """A micro batch's backward begins; with `split` weight gradients come later."""
        reduces = (last or self._every) and self._asynchronous and not split
        self._synced = reduces and last
        root = self._root
        root.set_is_last_backward(reduces)
        root.set_requires_gradient_sync(reduces)
        if reduces:
            root.set_requires_all_reduce(last)  # replicas of shards sum up once a step, whatever shards do
        root.set_reshard_after_backward(self._zero == 3 or (last and not split))

    def after_weights(self, *, last: bool) -> None:
        """A micro batch's deferred weight gradients are there."""
        if last or self._every:
            # Replicas too: what comes in one go differs (norms come with input gradients), and FSDP's sum of shards
            # that wait for their replicas takes one shape only.
            reduce_gradients(self._root)
            self._synced = last
        else:
            accumulate_gradients(self._root)

    def finish(self) -> None:
        """All gradients of the step are reduced when this returns."""
        if not self._synced:
            reduce_gradients(self._root)
        self._synced = True


def _units(module: Decoder, *, fused: bool) -> list[tuple[nn.Module, bool]]:
    """What is gathered and reduced as one message, inner parts first: experts, layers, embedding, head.

    A tied embedding and the head share a weight, so they stay with the root.
    """
    units: list[tuple[nn.Module, bool]] = []
    for layer in module.layers.values():
        units += [(part, True) for name, part in layer.named_modules() if name.endswith("experts")]
        if not fused:
            # Norms stay with their layer, whose weights are here throughout its backward: under selective recomputation
            # a norm's output is made again, with its weight, for a reader whose backward comes before the norm's own.
            units += [(part, False) for name, part in layer.named_children() if "norm" not in name]
        units.append((layer, False))
    tied = module.embedding is not None and module.head is not None and module.head.weight is module.embedding.weight
    if not tied:
        units += [(part, False) for part in (module.embedding, module.head) if part is not None]
    return units


def _first_through(module: Decoder) -> FSDPModule | None:
    """The unit whose forward ends first."""
    first = next(iter(module.layers.values()))
    parts = [module.embedding, *(part for name, part in first.named_modules() if name and "norm" not in name), first]
    return next((part for part in parts if isinstance(part, FSDPModule)), None)


def _swapped_out(
    module: Decoder, roles: dict[str, Role], dense: DeviceMesh, experts: DeviceMesh, dtype: torch.dtype, swap: Swapping
) -> dict[str, Tensor]:
    """Full-precision shards go to the host; what FSDP then shards is in low precision already."""
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        mesh = experts if roles[name].expert else dense
        size, rank = mesh.size(-1), mesh.get_local_rank("shard")
        axis = shard_axis(parameter.shape, size)
        shards = parameter.detach().chunk(size, axis)
        empty = parameter.detach().narrow(axis, 0, 0)
        found[name] = swap(shards[rank] if rank < len(shards) else empty)
        parameter.data = parameter.data.to(dtype)
    return found


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else local_part(parameter.grad)
