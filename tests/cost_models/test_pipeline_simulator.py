"""The simulator against a longest path in a networkx graph, and against cases counted by hand."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.errors import TitanPlanError
from cost_models.pipeline_simulator import peak_live, simulate
from cost_models.schedules import SCHEDULES, Action, RankActions, schedule_actions, schedule_valid

SHAPES = [
    (name, pp, vpp, micro_batches)
    for code, name in enumerate(SCHEDULES)
    for pp in (1, 2, 3, 4)
    for vpp in (1, 2, 3)
    for micro_batches in (1, 2, 3, 4, 6, 8)
    if schedule_valid(np.array(code), np.array(pp), np.array(vpp), np.array(micro_batches)).item()
]


def longest_path_s(
    lists: tuple[RankActions, ...], times: dict[str, list[float]], p2p_s: float, last_stage: int
) -> float:
    """The step as the longest path of a graph whose edges are written from the meaning of the actions."""
    graph = nx.DiGraph()
    rank_of = {action: rank for rank, own in enumerate(lists) for action in own}

    def add(before: Action, after: Action) -> None:
        took = times[before.kind][before.stage]
        graph.add_edge(before, after, weight=took + (p2p_s if rank_of[before] != rank_of[after] else 0.0))

    for own in lists:
        for before, after in pairwise(own):
            add(before, after)
        for action in own:
            graph.add_edge(action, "end", weight=times[action.kind][action.stage])
    for kind, stage, micro in rank_of:
        action = Action(kind, stage, micro)
        if kind == "F":
            if stage < last_stage:
                add(action, Action("F", stage + 1, micro))
            add(action, next(a for a in (Action("B", stage, micro), Action("I", stage, micro)) if a in rank_of))
        elif kind in "BI" and stage:
            add(action, Action(kind, stage - 1, micro))
        if kind == "I":
            add(action, Action("W", stage, micro))
    return float(nx.dag_longest_path_length(graph))


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(SHAPES), st.randoms(use_true_random=False), st.floats(0.0, 3.0))
def test_the_step_is_the_longest_path_with_any_stage_times(
    shape: tuple[str, int, int, int], random: Random, p2p_s: float
) -> None:
    name, pp, vpp, micro_batches = shape
    lists = schedule_actions(name, pp, vpp, micro_batches)
    draw = [[random.uniform(0.1, 4.0) for _ in range(pp * vpp)] for _ in "FIW"]
    full = [i + w for i, w in zip(draw[1], draw[2], strict=True)]
    times = {"F": draw[0], "I": draw[1], "W": draw[2], "B": full}
    result = simulate(lists, *draw, p2p_s)
    assert result.step_time_s == pytest.approx(longest_path_s(lists, times, p2p_s, pp * vpp - 1))
    for rank, own in enumerate(lists):
        assert result.busy_s[rank] == pytest.approx(sum(times[action.kind][action.stage] for action in own))
        assert result.bubble_s[rank] == pytest.approx(result.step_time_s - result.busy_s[rank])


def test_two_ranks_counted_by_hand() -> None:
    """1F1B, f = 1, i = 1, w = 2, p2p = 0.5. Rank 1 starts at 1.5 and never waits; rank 0 ends 3.5 later."""
    result = simulate(schedule_actions("1f1b", 2, 1, 2), (1, 1), (1, 1), (2, 2), 0.5)
    ends = [[(a.action.kind, a.action.micro, a.end_s) for a in own] for own in result.timeline]
    assert ends[1] == [("F", 0, 2.5), ("B", 0, 5.5), ("F", 1, 6.5), ("B", 1, 9.5)]
    assert ends[0] == [("F", 0, 1.0), ("F", 1, 2.0), ("B", 0, 9.0), ("B", 1, 13.0)]
    assert result.step_time_s == 13.0
    assert result.worst_bubble_s == 5.0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_timeline_never_overlaps_and_never_starts_early(shape: tuple[str, int, int, int]) -> None:
    name, pp, vpp, micro_batches = shape
    stages = pp * vpp
    result = simulate(schedule_actions(*shape), [1.0] * stages, [0.7] * stages, [0.4] * stages, 0.1)
    ended = {a.action: a.end_s for own in result.timeline for a in own}
    for own in result.timeline:
        for before, after in pairwise(own):
            assert after.start_s >= before.end_s
        for timed in own:
            kind, stage, micro = timed.action
            source = {"F": Action("F", stage - 1, micro), "W": Action("I", stage, micro)}.get(
                kind, Action(kind, stage + 1, micro)
            )
            assert timed.start_s >= ended.get(source, 0.0)
    assert len(ended) == stages * micro_batches * (3 if name.startswith("z") else 2)


def test_lists_that_wait_for_each_other_are_a_deadlock() -> None:
    lists = (
        (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)),
        (Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)),
    )
    with pytest.raises(TitanPlanError, match=r"S406.*rank 0 at B stage 0 micro 0, rank 1 at F stage 1 micro 1"):
        simulate(lists, (1, 1), (1, 1), (1, 1))


def test_times_must_cover_the_stages() -> None:
    with pytest.raises(TitanPlanError, match="S405"):
        simulate(schedule_actions("1f1b", 2, 1, 2), (1, 1), (1,), (1, 1))


def test_live_micro_batches_of_1f1b_fall_along_the_ranks() -> None:
    lists = schedule_actions("1f1b", 4, 1, 8)
    assert peak_live(lists) == (4, 3, 2, 1)
    assert peak_live(lists, (10, 5, 5, 7)) == (40, 15, 10, 7)
    assert peak_live(schedule_actions("gpipe", 4, 1, 8)) == (8, 8, 8, 8)


def test_unequal_chunks_weigh_by_what_is_alive_together() -> None:
    """zb-v, pp 2, rank 0: F0 F0 F0 of stage 0, then F of stage 3 joins: 3 x 1 + 10; rank 1 peaks with 2 and 2."""
    assert peak_live(schedule_actions("zb-v", 2, 2, 4), (1, 1, 1, 10)) == (13.0, 4.0)


def test_live_counts_follow_the_clock_too() -> None:
    """The count by order is the count by time: at each start of a forward, those begun and not yet freed."""
    lists = schedule_actions("zero-bubble", 4, 2, 8)
    result = simulate(lists, [1.0] * 8, [0.5] * 8, [0.8] * 8, 0.2)
    for rank, own in enumerate(result.timeline):
        begun = [a.start_s for a in own if a.action.kind == "F"]
        freed = [a.end_s for a in own if a.action.kind == "W"]
        counts = [sum(start <= now for start in begun) - sum(end <= now for end in freed) for now in begun]
        assert peak_live(lists)[rank] == max(counts)


def test_an_input_gradient_may_free_a_share() -> None:
    """zero-bubble, pp 4: rank 3 delays three weight gradients, so 1 + 3 alive; when I frees all, only one is."""
    lists = schedule_actions("zero-bubble", 4, 1, 8)
    assert peak_live(lists) == (4, 4, 4, 4)
    assert peak_live(lists, freed_by_input_grad=1.0) == (4, 3, 2, 1)
    assert peak_live(lists, freed_by_input_grad=0.5) == (4, 3.5, 3, 2.5)
    again = tuple(Action(kind, 0, int(micro)) for kind, micro in ("F0", "I0", "W0", "F1", "F2", "I1", "F3"))
    assert peak_live((again,), freed_by_input_grad=0.25) == (2.75,)
    with pytest.raises(TitanPlanError, match="C610"):
        peak_live(lists, freed_by_input_grad=1.5)
