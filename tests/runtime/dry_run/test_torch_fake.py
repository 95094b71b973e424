"""Canary: the private names of torch that the dry run reads are there and mean what it thinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from runtime.dry_run import torch_fake


def test_a_fake_world_has_a_rank_and_ends() -> None:
    with torch_fake.fake_world(5, 8):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 8)
        with pytest.raises(RuntimeError, match="open already"), torch_fake.fake_world(0, 2):
            pass
    assert not dist.is_initialized()


def test_fake_tensors_have_storages_of_the_right_size_and_an_identity() -> None:
    with torch_fake.fake_tensors():
        x = torch.empty(3, 4, dtype=torch.bfloat16)
        assert torch_fake.is_fake(x)
        assert x.untyped_storage().nbytes() == 24
        assert torch_fake.storage_key(x[1:]) == torch_fake.storage_key(x) != torch_fake.storage_key(x.clone())
    assert not torch_fake.is_fake(torch.empty(1))


def test_a_storage_that_shrinks_and_grows_is_told() -> None:
    told = []
    with torch_fake.resizes_told(lambda storage: told.append(storage.nbytes())):
        x = torch.empty(4)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(16)
    x.untyped_storage().resize_(0)
    assert told == [0, 16]


def test_inside_backward_the_node_has_a_name() -> None:
    names = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
            names.append(torch_fake.backward_node())
            return x * 2

        @staticmethod
        def backward(_ctx: object, g: torch.Tensor) -> torch.Tensor:
            names.append(torch_fake.backward_node())
            return g * 2

    Noted.apply(torch.ones(2, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    assert names == ["", "NotedBackward"]


def test_messages_tell_their_group_and_bytes() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
            result = func(*args, **(kwargs or {}))
            if torch_fake.is_message(func):
                group, n_bytes = torch_fake.message_of(func, args)
                found.append((dist.get_process_group_ranks(group), n_bytes))
            return result

    with torch_fake.fake_world(0, 4), Seen():
        x = torch.zeros(8)
        dist.all_reduce(x)
        dist.all_gather_single(torch.empty(32), x)
        dist.reduce_scatter_single(torch.empty(2), x)
        dist.all_to_all_single(torch.empty(8), x)
        dist.barrier()
    # All-gather: output; reduce-scatter: input.
    assert [n for _, n in found] == [32, 128, 32, 32]
    assert found[0][0] == [0, 1, 2, 3]


def test_a_held_message_lets_go_when_it_is_waited_for() -> None:
    import weakref

    from torch.distributed.pipelining import schedules

    with torch_fake.fake_world(0, 2), torch_fake.messages_held():
        x = torch.zeros(4)
        gone = weakref.ref(x)
        works = schedules._batch_p2p([dist.P2POp(dist.isend, x, 1)])
        del x
        assert gone() is not None
        schedules._wait_batch_p2p(works)
        assert gone() is None


def test_gradients_that_wait_for_their_reduction_have_names() -> None:
    with torch_fake.fake_world(0, 2):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        module.set_requires_gradient_sync(False)
        module(torch.ones(3, 4)).sum().backward()
        found = dict(torch_fake.waiting_gradients(module))
        assert {name: tuple(gradient.shape) for name, gradient in found.items()} == {
            "0.weight": (4, 4),
            "0.bias": (4,),
            "1.weight": (2, 4),
            "1.bias": (2,),
        }
        assert torch.equal(found["1.bias"], torch.full((2,), 3.0))
