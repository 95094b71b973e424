"""A rank's part of a whole tensor: DTensor's own arithmetic, its distribution, and what FSDP does after tp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.parallel.slices import local_slices, part_slices
from runtime.parallel.torch_private import sharded_placements
from runtime.parallel.trainable import Whole

SIZES = (2, 3, 2)


@contextmanager
def mesh_of(rank: int) -> Iterator[DeviceMesh]:
    """The mesh (replicate, shard, tp) of a process of a world without any others."""
    dist.init_process_group("fake", rank=rank, world_size=12, store=FakeStore())
    try:
        yield DeviceMesh("cpu", torch.arange(12).view(SIZES), mesh_dim_names=("replicate", "shard", "tp"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("cut", "axis"), [(None, 0), (0, 0), (0, 1), (1, 0), (1, 1), (None, 1)])
@pytest.mark.parametrize("shape", [(12, 24), (24, 12, 6)])
def test_slices_are_those_of_dtensor(cut: int | None, axis: int, shape: tuple[int, ...]) -> None:
    placements = sharded_placements(cut, 2, axis)
    for at in product(*map(range, SIZES)):
        lengths, offsets = _compute_local_shape_and_global_offset(shape, SIZES, list(at), placements)
        found = part_slices(shape, SIZES, placements, at)
        assert tuple(s.start for s in found) == tuple(offsets)
        assert tuple(s.stop - s.start for s in found) == tuple(lengths)


@pytest.mark.parametrize("rank", [0, 5, 10, 11])
@pytest.mark.parametrize(
    "placements",
    [(Replicate(), Shard(0), Shard(1)), (Replicate(), Shard(1), Replicate()), (Shard(0), Replicate(), Shard(0))],
)
def test_slices_take_what_distribute_tensor_gives(rank: int, placements: tuple[Replicate | Shard, ...]) -> None:
    whole = torch.arange(7.0 * 10).view(7, 10)
    with mesh_of(rank) as mesh:
        wanted = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        found = local_slices(Whole(shape=(7, 10), mesh=mesh, placements=placements), mesh.get_coordinate())
    assert torch.equal(whole[found], wanted)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
def test_what_tp_leaves_is_cut_again_over_data_ranks(rows: int, tp: int, shard: int, copies: int) -> None:
    """FSDP chunks the rows that a tp rank holds: the last data ranks may get fewer, or none."""
    whole = torch.arange(rows * tp)
    placements = sharded_placements(0, tp, 0)
    for replicate, data, cut in product(range(copies), range(shard), range(tp)):
        chunks = whole.chunk(tp)[cut].chunk(shard)
        wanted = chunks[data] if data < len(chunks) else whole[:0]
        found = part_slices((rows * tp,), (copies, shard, tp), placements, (replicate, data, cut))
        assert torch.equal(whole[found], wanted)


def test_a_process_alone_holds_the_whole() -> None:
    whole = Whole(shape=(3, 5), mesh=None, placements=())
    assert local_slices(whole, None) == (slice(0, 3), slice(0, 5))
