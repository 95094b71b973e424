"""The one place that touches private names of torch 2.13, each behind a function that says what it does.

The version is pinned in pyproject.toml; `tests/runtime/parallel/test_torch_private.py` is the canary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor.placement_types import Placement


def initialise(root: FSDPModule) -> None:
    """Let FSDP finish what it does at the first forward, so that the shards' memory is final."""
    root._get_fsdp_state()._lazy_init()


def _groups(root: FSDPModule) -> list[Any]:
    states = root._get_fsdp_state()._state_ctx.all_states
    return [group for state in states for group in state._fsdp_param_groups]


def accumulate_gradients(root: FSDPModule) -> None:
    """Add gradients that were delivered outside autograd to the accumulated ones, in full precision."""
    for group in _groups(root):
        group.reduce_grads = False
        group.post_backward()


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce all accumulated gradients now and wait for them.

    Gradients of one group may have come in two dtypes (accumulated ones in full precision, the last ones as they are):
    all become full precision first.
    """
    accumulate_gradients(root)
    state = root._get_fsdp_state()
    state._state_ctx.is_last_backward = True
    for group in _groups(root):
        group.reduce_grads = True
        group.reshard_after_backward = True
        group.post_backward()
    state._root_post_backward_final_callback()


def keep_gradients_wide(root: FSDPModule) -> None:
    """Reduced gradients stay in full precision though the parameters are not: FSDP would cast them to be alike."""
    for group in _groups(root):
        group._orig_dtype = torch.float32
        for parameter in group.fsdp_params:
            parameter.sharded_param.grad_dtype = None


def sharded_placements(cut: int | None, tp: int, shard_axis: int) -> tuple[Placement, ...]:
    """Placements on a (replicate, shard, tp) mesh of a parameter cut over tp first and sharded over data ranks then."""
    outer: Placement = Replicate() if cut is None or tp == 1 else Shard(cut)
    inner: Placement = Shard(shard_axis)
    if cut == shard_axis and tp > 1:
        inner = _StridedShard(shard_axis, split_factor=tp)
    return (Replicate(), inner, outer)


def local_part(tensor: Any) -> Tensor:  # noqa: ANN401 - a DTensor or a plain tensor
    """This rank's part, sharing memory with the parameter."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()
