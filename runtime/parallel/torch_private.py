"""The one place that touches private names of torch 2.13, each behind a function that says what it does.

The version is pinned in pyproject.toml; `tests/runtime/parallel/test_torch_private.py` is the canary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from runtime.autograd import apply

if TYPE_CHECKING:
    import torch.distributed as dist
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
        group.all_reduce_grads = True  # over the replicas of shards; off since the last `set_requires_gradient_sync`
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


_UNDER_WAY = 2
"""Sends of a stage that may wait for their receiver; the sender runs ahead of it by as many micro batches."""


class LeanStage(PipelineStage):
    """A stage that holds what it sends and receives no longer than it must.

    torch's own has a buffer for every micro batch of a step, in both directions, through the whole run, and keeps what
    it has sent until its backward, which does not read it. Its schedules, but for 1F1B, whose sends and receives go
    together, hold what is under way until the end of the step: with `sends_itself` only the last few are held. Waiting
    for an older one cannot lock up: the receiver's order has its receive before whatever may depend on a later send.
    """

    sends_itself = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as torch's stage
        super().__init__(*args, **kwargs)
        self._under_way: list[tuple[dist.Work, Tensor]] = []

    def _sent(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Send now where that is ours to do; what is left to the schedule."""
        if not self.sends_itself:
            return ops
        for op in ops:
            work = op.op(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer)
            if work is not None:
                self._under_way.append((work, op.tensor))
        while len(self._under_way) > _UNDER_WAY:
            self._under_way.pop(0)[0].wait()
        return []

    def finish_sends(self) -> None:
        """Wait for what is still under way."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way = []

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        real, self.device = self.device, torch.device("meta")
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self.device = real
        _drop_buffers(self.args_recv_info)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        real, self.device = self.device, torch.device("meta")
        super()._setup_backward_recv_info(num_microbatches)
        self.device = real
        _drop_buffers(self.grad_recv_info)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Make room for what comes."""
        _fill_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Make room for what comes."""
        if self.has_backward and not self.is_last:
            _fill_buffers(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = super()._retrieve_recv_activations(fwd_chunk_id)
        _drop_buffers({fwd_chunk_id: self.args_recv_info[fwd_chunk_id]})
        return found

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        found: tuple[Tensor | None, ...] = super()._retrieve_recv_grads(bwd_chunk_id)
        _drop_buffers({bwd_chunk_id: self.grad_recv_info[bwd_chunk_id]})
        return found

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send an output, and keep a hollow one that backward starts from."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if ops:
            outputs, inputs = self.fwd_cache[fwd_chunk_id]
            with torch.enable_grad():
                self.fwd_cache[fwd_chunk_id] = (tuple(apply(_Hollow, out) for out in outputs), inputs)
        return self._sent(ops)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradient of an input."""
        return self._sent(super().get_bwd_send_ops(bwd_chunk_id))


class _Hollow(torch.autograd.Function):
    """A tensor of the same shape without the memory; its gradient passes through."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        return x.new_empty(1).expand(x.shape)

    @staticmethod
    def backward(_ctx: Any, g: Tensor) -> Tensor:  # noqa: ANN401
        return g


def _fill_buffers(infos: tuple[Any, ...], device: torch.device) -> None:
    for info in infos:
        if info.tensor_meta is not None and not info.is_root_arg:
            meta = info.tensor_meta
            info.buffer = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)


def _drop_buffers(infos: dict[int, tuple[Any, ...]]) -> None:
    for chunk in infos.values():
        for info in chunk:
            info.buffer = None


def settle_shapes(schedule: Any) -> None:  # noqa: ANN401 - one of torch's schedules
    """Let a schedule know that all stages know their shapes, without asking the other ranks."""

    def settled(stages: list[Any], _has_backward: bool, _done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = settled


def local_part(tensor: Any) -> Tensor:  # noqa: ANN401 - a DTensor or a plain tensor
    """This rank's part, sharing memory with the parameter."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()
