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
from torch.testing._internal.distributed.fake_pg import FakeStore

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


def is_message(function: Any) -> bool:  # noqa: ANN401 - an operator of torch
    """Whether an operator sends something, and does not only wait."""
    return function in collective_ops and function not in sync_ops


def message_of(function: Any, args: Any, result: Any) -> tuple[dist.ProcessGroup, int]:  # noqa: ANN401
    """The group of a message and its bytes: gather: output, scatter: input, otherwise the tensor."""
    group = CollectiveOp.get_process_group(function, args)
    return group, int(CollectiveOp.get_comm_tensor_size(function, result, args, None))


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


def whole_gradients(module: nn.Module) -> Iterator[Tensor]:
    """Gradients that FSDP has accumulated and not reduced yet."""
    for parameter in _fsdp_parameters(module):
        unsharded = getattr(parameter, "_unsharded_param", None)
        for found in (parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad):
            if found is not None:
                yield found


def _fsdp_parameters(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params
