"""The one place of the dry run that touches private names of torch 2.13, each behind a function that says what it does.

The version is pinned in pyproject.toml; `tests/runtime/dry_run/test_torch_fake.py` is the canary.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """A process group whose other ranks never answer and whose messages arrive at once."""
    if dist.is_initialized():
        raise RuntimeError("a process group is open already")
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_tensors() -> FakeTensorMode:
    """Tensors with shape and dtype but without values. The few that were made before are let in."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(x: object) -> bool:
    """Whether a tensor has no values."""
    return isinstance(x, FakeTensor)


def is_plain(x: object) -> bool:
    """Whether a tensor has memory of its own: a DTensor only wraps one that has."""
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor)


def storage_key(x: Tensor) -> int:
    """Identity of the memory behind a tensor, as long as it lives."""
    return x.untyped_storage()._cdata


@contextmanager
def resizes_told(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """FSDP frees gathered weights by shrinking their storage, which no operator shows."""
    inner = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        found = inner(storage, size)
        tell(storage)
        return found

    with patch.object(torch.UntypedStorage, "resize_", resize):
        yield


class _Sent:
    """A message that holds its tensors until it is waited for, as those of a real backend do."""

    def __init__(self, work: dist.Work, tensors: list[Tensor]) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        """Let go of the tensors."""
        self._work.wait()
        self._tensors.clear()


@contextmanager
def messages_held() -> Iterator[None]:
    """Sends and receives between pipeline stages hold their tensors until their end; fake ones would not."""
    inner = schedules._batch_p2p

    def batch(ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:
        tensors = [op.tensor for op in ops]
        works = inner(ops, desc)
        return [_Sent(work, tensors) for work in works]

    with patch.object(schedules, "_batch_p2p", batch):
        yield


def is_message(function: Any) -> bool:  # noqa: ANN401 - an operator of torch
    """Whether an operator sends something, and does not only wait."""
    return function in collective_ops and function not in sync_ops


def message_of(function: Any, args: Any) -> tuple[dist.ProcessGroup, int]:  # noqa: ANN401 - an operator of torch
    """The group of a message and its bytes: gather: output, scatter: input, otherwise the tensor.

    torch's own count takes the memory behind a tensor, which is more where the tensor is a view.
    """
    group = CollectiveOp.get_process_group(function, args)
    sent = args[1] if function._overloadpacket.__name__ == "_reduce_scatter_base_" else args[0]
    tensors = [x for x in tree_leaves(sent) if isinstance(x, torch.Tensor)]
    return group, sum(x.numel() * x.element_size() for x in tensors)


def backward_node() -> str:
    """Name of the autograd node that runs now; empty outside backward."""
    node = torch._C._current_autograd_node()
    return "" if node is None else str(node.name())


def gathered_weights(module: nn.Module) -> Iterator[Tensor]:
    """What FSDP gathers the weights of a module into."""
    for parameter in _fsdp_parameters(module):
        yield from getattr(parameter, "all_gather_outputs", ())
        if hasattr(parameter, "_unsharded_param"):
            yield parameter._unsharded_param


def waiting_gradients(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Gradients that FSDP has accumulated and not reduced yet, or not yet over the replicas of shards, and of what."""
    for group in _fsdp_groups(module):
        if group._partial_reduce_output is not None:
            yield group._module_fqn or "", group._partial_reduce_output
    for parameter in _fsdp_parameters(module):
        unsharded = getattr(parameter, "_unsharded_param", None)
        for found in (parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad):
            if found is not None:
                yield parameter._param_fqn or "", found


def _fsdp_parameters(module: nn.Module) -> Iterator[Any]:
    for group in _fsdp_groups(module):
        yield from group.fsdp_params


def _fsdp_groups(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            yield from part._get_fsdp_state()._fsdp_param_groups
