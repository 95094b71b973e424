"""The ranks of each dimension are those that the planner prices."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.groups import Axes, Groups
from cost_models.layout import CP_KINDS, PLACEMENTS, Layout, Layouts
from cost_models.rank_grid import RankGrid

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks import RankPool

SMALL = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw: Callable[..., object]) -> Layout:
    """Layouts whose ep keeps D206, and whose shards keep D211."""
    tp, cp, pp, dp = (int(draw(SMALL)) for _ in range(4))  # type: ignore[call-overload]
    zero = draw(st.integers(0, 3))
    shard = draw(st.sampled_from([d for d in range(1, dp + 1) if dp % d == 0])) if zero else 1
    width = int(shard) if zero else dp  # type: ignore[call-overload]
    of_dp = [e for e in range(1, dp + 1) if width % e == 0 or (e % width == 0 and dp % e == 0)]
    inner = [e for e in range(1, tp + 1) if tp % e == 0] + [tp * e for e in range(1, cp + 1) if cp % e == 0]
    ep = draw(st.sampled_from(inner + [tp * cp * e for e in of_dp]))
    kind = "ring" if cp > 1 else CP_KINDS[0]
    placement = draw(st.sampled_from(PLACEMENTS))
    return Layout(
        tp=tp, sp=tp > 1, cp=cp, cp_kind=kind, pp=pp, dp=dp, dp_shard=shard, zero=zero, ep=ep, placement=placement
    )  # type: ignore[arg-type]


def planned(axes: Axes, devices: int) -> set[frozenset[int]]:
    """Every group of a dimension, spread over the job from the one at rank 0."""
    pairs = [(int(np.ravel(size)[0]), int(np.ravel(stride)[0])) for size, stride in axes]
    first = [sum(steps) for steps in itertools.product(*(range(0, size * stride, stride) for size, stride in pairs))]
    groups: set[frozenset[int]] = set()
    for rank in range(devices):
        if not any(rank in group for group in groups):
            groups.add(frozenset(rank + step for step in first))
    return groups


def made(grid: np.ndarray, axis: int) -> set[frozenset[int]]:
    """Every group along an axis of a grid of ranks."""
    return {frozenset(row) for row in np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]).tolist()}


@given(layouts())
def test_the_ranks_of_a_dimension_are_those_that_are_priced(layout: Layout) -> None:
    grid, groups = RankGrid.of(layout), Groups.of(Layouts.of([layout]))
    dense, experts = grid.dense(), grid.experts()
    pairs = [
        (groups.tp, made(grid.ranks, 3)),
        (groups.cp, made(grid.ranks, 2)),
        (groups.pp, made(grid.ranks, 0)),
        (groups.replica, made(dense, 1)),
        (groups.shard, made(dense, 2)),
        (groups.tp, made(dense, 3)),
    ]
    if layout.ep > 1:
        pairs += [
            (groups.ep, made(experts, 3)),
            (groups.expert_shard, made(experts, 2)),
            (groups.expert_replica, made(experts, 1)),
        ]
    for axes, found in pairs:
        assert found == planned(axes, layout.devices)


@given(layouts())
def test_every_grid_holds_each_rank_once(layout: Layout) -> None:
    grid = RankGrid.of(layout)
    for ranks in (grid.ranks, grid.dense(), grid.experts()):
        assert sorted(ranks.reshape(-1).tolist()) == list(range(layout.devices))


@given(layouts())
def test_coordinates_are_where_a_rank_stands(layout: Layout) -> None:
    grid = RankGrid.of(layout)
    for rank in range(layout.devices):
        at = grid.coordinates(rank)
        assert grid.ranks[at.pp, at.dp, at.cp, at.tp] == rank


def test_placements_by_hand() -> None:
    """tp is innermost in both; dp, then pp outermost, or the other way round."""
    near, far = (RankGrid.of(Layout(tp=2, pp=2, dp=2, placement=placement)) for placement in PLACEMENTS)
    assert near.ranks[:, :, 0, 0].tolist() == [[0, 2], [4, 6]]
    assert far.ranks[:, :, 0, 0].tolist() == [[0, 4], [2, 6]]


def joined(layout: Layout, experts: bool) -> dict[str, list[int]]:
    """Ranks of each communicator of this process."""
    import torch.distributed as dist

    from runtime.parallel import groups

    made = groups.Groups(layout, "cpu", experts=experts)
    found = {name: getattr(made, name) for name in ("tp", "cp", "pp", "dp", "ep", "sequence")}
    found["ends"] = made.ends()
    return {name: dist.get_process_group_ranks(group) for name, group in found.items() if group is not None}


@pytest.mark.parametrize(
    ("layout", "experts", "rank", "wanted"),
    [
        (Layout(tp=2, pp=2, sp=True), False, 3, {"tp": [2, 3], "pp": [1, 3], "sequence": [2, 3], "ends": [1, 3]}),
        (Layout(cp=2, cp_kind="ring", dp=2, zero=1, dp_shard=2), False, 1, {"cp": [0, 1], "sequence": [0, 1]}),
        (
            Layout(tp=2, sp=True, dp=2, ep=4),
            True,
            2,
            {"tp": [2, 3], "dp": [0, 2], "ep": [0, 1, 2, 3], "sequence": [2, 3]},
        ),
        (
            Layout(tp=2, sp=True, cp=2, cp_kind="ring", ep=2),
            True,
            1,
            {"tp": [0, 1], "cp": [1, 3], "ep": [0, 1], "sequence": [0, 1, 2, 3]},
        ),
    ],
)
def test_communicators_hold_these_ranks(
    ranks: RankPool, layout: Layout, experts: bool, rank: int, wanted: dict[str, list[int]]
) -> None:
    assert ranks.run(layout.devices, joined, layout, experts)[rank] == wanted
