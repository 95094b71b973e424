"""Boxes of all ranks tile the whole, and of ranks with the same box one writes it."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from runtime.checkpoint_state import box_of, turn_of
from runtime.parallel.torch_private import sharded_placements
from runtime.parallel.trainable import Whole

degrees = st.integers(1, 4)


def ranks_of(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, sizes)))


@given(
    st.integers(1, 3), degrees, degrees, st.integers(1, 5), st.integers(1, 9), st.none() | st.just(0), st.integers(0, 1)
)
def test_written_boxes_tile_the_whole(
    copies: int, shard: int, tp: int, rows: int, columns: int, cut: int | None, axis: int
) -> None:
    """Each element is written exactly once, whichever axes are cut; uneven shards and empty ones included."""
    shape = (rows * tp, columns)
    whole = Whole(shape=shape, mesh=None, placements=sharded_placements(cut, tp, axis))
    sizes = (copies, shard, tp)
    for index in range(3):
        written = torch.zeros(shape, dtype=torch.int64)
        for at in ranks_of(sizes):
            box = box_of(whole, at, sizes)
            if turn_of(whole, at, sizes, index):
                written[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))] += 1
        assert written.eq(1).all()


@given(degrees, degrees, st.integers(1, 5), st.integers(1, 9), st.integers(0, 1))
def test_boxes_are_where_fsdp_and_tp_put_them(shard: int, tp: int, rows: int, columns: int, axis: int) -> None:
    """Independent truth: cut over tp by hand, then `torch.chunk` as FSDP does."""
    values = torch.arange(rows * tp * columns).view(rows * tp, columns)
    whole = Whole(shape=tuple(values.shape), mesh=None, placements=sharded_placements(0, tp, axis))
    for _, s, t in ranks_of((1, shard, tp)):
        box = box_of(whole, (0, s, t), (1, shard, tp))
        got = values[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]
        chunks = values.chunk(tp)[t].chunk(shard, axis)
        assert torch.equal(got.flatten(), chunks[s].flatten() if s < len(chunks) else values[:0].flatten())


def test_copies_take_turns() -> None:
    whole = Whole(shape=(4,), mesh=None, placements=(Replicate(), Shard(0), Replicate()))
    writers = [
        [at for at in ranks_of((2, 2, 3)) if at[1] == 0 and turn_of(whole, at, (2, 2, 3), index)] for index in range(6)
    ]
    assert all(len(found) == 1 for found in writers)
    assert len({found[0] for found in writers}) == math.prod((2, 3))
