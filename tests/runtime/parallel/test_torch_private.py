"""Canary: the private names of torch that the trainer reads are there and mean what it thinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from runtime.parallel import torch_private
from runtime.parallel.weight_gradients import WeightGradients

if TYPE_CHECKING:
    from tests.ranks import RankPool


def test_the_pinned_torch_is_the_one_that_was_read() -> None:
    assert torch.__version__.split("+")[0] == "2.13.0"


def sharded() -> nn.Linear:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    module = nn.Linear(4, 4, bias=False)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), mp_policy=policy)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    return module


def gradients(later: bool) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """This rank's shard, its gradient of two backwards, and whether it was there before it was asked for."""
    import torch.distributed as dist

    module = sharded()
    torch_private.initialise(module)
    x = torch.full((3, 4), float(dist.get_rank() + 1))
    for last in (False, True):
        module.set_requires_gradient_sync(last and not later)
        module(x).sum().backward()
    early = module.weight.grad is not None
    if later:
        torch_private.reduce_gradients(module)
    return torch_private.local_part(module.weight), torch_private.local_part(module.weight.grad), early


@pytest.mark.parametrize("later", [False, True])
def test_gradients_are_summed_over_micro_batches_and_ranks_when_asked(ranks: RankPool, later: bool) -> None:
    for weight, gradient, early in ranks.run(2, gradients, later):
        assert weight.shape == (2, 4)
        assert early == (not later)
        assert torch.equal(gradient, torch.full((2, 4), 2 * 3 * (1.0 + 2.0)))


def delivered() -> torch.Tensor:
    """Gradients given by hand, as a split backward does, accumulate until they are reduced."""
    module, store = sharded(), WeightGradients()
    torch_private.initialise(module)
    for value in (1.0, 10.0):
        module.set_requires_gradient_sync(False)
        module.set_reshard_after_backward(False)
        out = module(torch.ones(1, 4, requires_grad=True))
        torch.autograd.grad(out.sum(), module.weight)
        store.deliver(module.weight, torch.full_like(module.weight, value))
        torch_private.accumulate_gradients(module)
    torch_private.reduce_gradients(module)
    return torch_private.local_part(module.weight.grad)


def test_gradients_delivered_by_hand_are_reduced(ranks: RankPool) -> None:
    for gradient in ranks.run(2, delivered):
        assert torch.equal(gradient, torch.full((2, 4), 22.0))


@pytest.mark.parametrize(
    ("cut", "tp", "axis"), [(None, 1, 0), (None, 2, 1), (0, 1, 0), (0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)]
)
def test_placements_put_the_parts_together(ranks: RankPool, cut: int | None, tp: int, axis: int) -> None:
    """Cut over tp first and sharded then, the parts are the whole again, read by DTensor."""
    whole = torch.arange(64.0).reshape(8, 8)
    for found in ranks.run(4, put_together, whole, cut, tp, axis):
        assert torch.equal(found, whole)


def put_together(whole: torch.Tensor, cut: int | None, tp: int, axis: int) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2 // tp, 2, tp), mesh_dim_names=("replicate", "shard", "tp"))
    part = whole if cut is None else whole.chunk(tp, cut)[mesh.get_local_rank("tp")]
    part = part.chunk(2, axis)[mesh.get_local_rank("shard")].contiguous()
    placements = torch_private.sharded_placements(cut, tp, axis)
    return DTensor.from_local(part, mesh, placements, shape=whole.shape, stride=whole.stride()).full_tensor()
