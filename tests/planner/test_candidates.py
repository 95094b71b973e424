"""Who comes first, and who is on the front."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.layout import Layout, Layouts
from planner.candidates import FRONT_LEVELS, TIE, Best, Front, complexity, rank_order

PLAIN = Layout(dp=8)
GIB = float(2**30)


def first_of(layouts: list[Layout], step_s: list[float]) -> Layout:
    return layouts[int(rank_order(Layouts.of(layouts), np.array(step_s))[0])]


@pytest.mark.parametrize(
    "busier",
    [
        Layout(tp=2, dp=4),
        Layout(cp=2, cp_kind="ring", dp=4),
        Layout(pp=2, dp=4, schedule="1f1b"),
        replace(PLAIN, ep=2),
        replace(PLAIN, zero=1, dp_shard=8),
        replace(PLAIN, recompute="selective"),
        replace(PLAIN, swap_optimizer=True),
        replace(PLAIN, activation_offload=True),
        replace(PLAIN, zero=2, dp_shard=8, reduce_gradients="every"),
    ],
)
def test_of_equal_times_the_one_with_less_machinery_wins(busier: Layout) -> None:
    assert first_of([busier, PLAIN], [1.0, 1.0]) == PLAIN
    assert first_of([busier, PLAIN], [1.0, 1.0 + TIE / 4]) == PLAIN


def test_time_goes_before_machinery() -> None:
    busy = Layout(tp=2, pp=2, dp=2, schedule="1f1b", recompute="full")
    assert first_of([PLAIN, busy], [1.0 + 10 * TIE, 1.0]) == busy


def test_less_recomputation_goes_before_more() -> None:
    layouts = [replace(PLAIN, recompute=text) for text in ("full", "none", "selective")]
    order = rank_order(Layouts.of(layouts), np.ones(3))
    assert [layouts[i].recompute for i in order] == ["none", "selective", "full"]


def test_sharding_over_all_of_dp_goes_before_a_part_of_it() -> None:
    whole, part = (replace(PLAIN, zero=1, dp_shard=shard) for shard in (8, 2))
    assert first_of([part, whole], [1.0, 1.0]) == whole


def test_the_order_does_not_depend_on_the_order_of_what_is_ordered() -> None:
    layouts = [
        Layout(tp=tp, pp=8 // tp, zero=0, schedule=schedule, micro_batch=micro)
        for tp in (1, 2, 4)
        for schedule in ("1f1b", "gpipe")
        for micro in (1, 2)
    ]
    forward = rank_order(Layouts.of(layouts), np.ones(len(layouts)))
    backward = rank_order(Layouts.of(layouts[::-1]), np.ones(len(layouts)))
    assert [layouts[i] for i in forward] == [layouts[::-1][i] for i in backward]


def test_machinery_counts_dimensions_above_all() -> None:
    counted = complexity(Layouts.of([PLAIN, Layout(tp=2, dp=4), Layout(tp=2, pp=2, dp=2, schedule="1f1b")]))
    assert counted[0] < counted[1] < counted[2]


def test_sharding_nothing_is_simpler_than_sharding() -> None:
    counted = complexity(Layouts.of([PLAIN, *(replace(PLAIN, zero=z, dp_shard=8) for z in (1, 2, 3))]))
    assert (np.diff(counted) > 0).all()


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=40), st.integers(1, 10), st.integers(1, 7))
def test_the_best_of_parts_are_the_best_of_all(steps: list[float], count: int, part: int) -> None:
    layouts = Layouts.of([replace(PLAIN, micro_batch=i + 1) for i in range(len(steps))])
    times = np.array(steps)
    best = Best(count=count)
    for start in range(0, len(steps), part):
        which = np.arange(start, min(start + part, len(steps)))
        best.offer(layouts.take(which), times[which], times[which])
    assert best.found is not None
    expected = rank_order(layouts, times)[:count]
    np.testing.assert_array_equal(best.found.step_s, times[expected])
    np.testing.assert_array_equal(best.found.layouts.micro_batch, expected + 1)
    assert (best.limit_s < np.inf) == (len(steps) >= count)


def test_what_does_not_fit_is_never_kept() -> None:
    best = Best(count=3)
    best.offer(Layouts.of([PLAIN]), np.array([np.inf]), np.array([1.0]))
    assert best.found is None
    front = Front(usable_bytes=64 * GIB)
    front.offer(Layouts.of([PLAIN]), np.array([np.inf]), np.array([1.0]))
    assert front.sorted_points() == ()


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.0, 64.0)), min_size=1, max_size=60), st.integers(1, 9))
def test_the_front_is_what_nothing_beats_in_both(offers: list[tuple[float, float]], part: int) -> None:
    layouts = Layouts.of([replace(PLAIN, micro_batch=i + 1) for i in range(len(offers))])
    step, peak = (np.array(column) for column in zip(*offers, strict=True))
    peak = peak * GIB
    front = Front(usable_bytes=64 * GIB)
    for start in range(0, len(offers), part):
        which = np.arange(start, min(start + part, len(offers)))
        front.offer(layouts.take(which), step[which], peak[which])
    points = front.sorted_points()
    headroom = 64 * GIB - peak
    for point in points:
        assert step[point.layout.micro_batch - 1] == point.step_s
        assert not ((step < point.step_s) & (headroom >= point.headroom_bytes)).any()
    assert points[0].step_s == step.min()
    level = 64 * GIB / FRONT_LEVELS
    for index, time in enumerate(step):
        assert any(p.step_s <= time and p.headroom_bytes > headroom[index] - level * (1 + 1e-9) for p in points)
