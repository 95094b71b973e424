"""Chunks that a rank holds at once, against counts in the action lists."""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cost_models.pipeline_chunks import gathered_chunks, left_behind, live_chunks, per_turn, waiting_chunks
from cost_models.pipeline_simulator import peak_live
from cost_models.schedules import SCHEDULES, schedule_actions, schedule_code
from tests.cost_models.schedule_shapes import SHAPES

if TYPE_CHECKING:
    from cost_models.schedules import Action

SPLIT = ("zero-bubble", "zb-v")


def columns(name: str, pp: int, *values: int) -> list[np.ndarray]:
    """One row a rank."""
    return [np.full(pp, value) for value in (schedule_code(name), pp, *values)]


@pytest.mark.parametrize("freed", [0.0, 0.4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_live_chunks_are_those_of_the_issue_order_on_every_rank(name: str, freed: float) -> None:
    for pp, vpp, micro_batches in SHAPES[name]:
        rank = np.arange(pp)
        shape = [np.full(pp, value) for value in (schedule_code(name), pp, vpp, micro_batches)]
        expected = peak_live(schedule_actions(name, pp, vpp, micro_batches), freed_by_input_grad=freed)
        assert live_chunks(*shape, rank, freed) == pytest.approx(expected), (pp, vpp, micro_batches)


def backwards(actions: tuple[Action, ...]) -> list[tuple[int, int]]:
    """Of each input gradient: chunks with activations and its own, and others that wait for weight gradients."""
    alive = waiting = 0
    found = []
    for action in actions:
        if action.kind == "F":
            alive += 1
        elif action.kind == "I":
            found.append((alive, waiting))
            alive, waiting = alive - 1, waiting + 1
        elif action.kind == "W":
            waiting -= 1
    return found


@pytest.mark.parametrize("name", SPLIT)
def test_most_wait_for_weight_gradients_where_the_action_lists_say_so(name: str) -> None:
    for pp, vpp, micro_batches in SHAPES[name]:
        told = waiting_chunks(*columns(name, pp, vpp, micro_batches), np.arange(pp))
        for rank, actions in enumerate(schedule_actions(name, pp, vpp, micro_batches)):
            found = backwards(actions)
            waiting = max(others for _, others in found)
            alive = max(alive for alive, others in found if others == waiting)
            assert told[1][rank] == waiting, (pp, vpp, micro_batches, rank)
            if waiting:
                assert told[0][rank] == alive, (pp, vpp, micro_batches, rank)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in SPLIT])
def test_nothing_waits_where_backward_is_whole(name: str) -> None:
    for pp, vpp, micro_batches in SHAPES[name]:
        alive, waiting = waiting_chunks(*columns(name, pp, vpp, micro_batches), np.arange(pp))
        assert not alive.any()
        assert not waiting.any()


def gathered(actions: tuple[Action, ...], vpp: int) -> int:
    """The most chunks with weights in a backward, once all have had weight gradients, until a fold puts these off."""
    there: set[int] = set()
    reduced: set[int] = set()
    most = 0
    for action in actions:
        if action.kind == "W":
            reduced.add(action.stage)
            there.discard(action.stage)
            continue
        there.add(action.stage)
        if action.kind == "I" and len(reduced) == vpp:
            most = max(most, len(there))
    return most


def until_put_off(actions: tuple[Action, ...]) -> int:
    """Actions before the first input gradient that its weight gradient does not follow."""
    for place, (action, next_) in enumerate(pairwise(actions)):
        if action.kind == "I" and next_.kind != "W":
            return place
    return len(actions)


@pytest.mark.parametrize("name", SPLIT)
def test_gathered_chunks_are_counted_and_at_most_one_off_where_a_rank_has_three(name: str) -> None:
    for pp, vpp, micro_batches in SHAPES[name]:
        if micro_batches < 2 * pp:
            continue
        told = gathered_chunks(*columns(name, pp, vpp), np.arange(pp))
        for rank, actions in enumerate(schedule_actions(name, pp, vpp, micro_batches)):
            found = gathered(actions[: until_put_off(actions) if name == "zb-v" else None], vpp)
            assert abs(told[rank] - found) <= (vpp > 2), (pp, vpp, micro_batches, rank)


def at_weight_gradients(actions: tuple[Action, ...]) -> list[tuple[int, bool, int]]:
    """Of weight gradients: chunks that have some already, whether this one has, and others in flight or waiting."""
    alive = waiting = 0
    done: set[int] = set()
    found = []
    for action in actions:
        if action.kind == "F":
            alive += 1
        elif action.kind == "I":
            alive, waiting = alive - 1, waiting + 1
        elif action.kind == "W":
            waiting -= 1
            found.append((len(done), action.stage in done, alive + waiting))
            done.add(action.stage)
    return found


@pytest.mark.parametrize("name", SPLIT)
def test_in_each_turn_others_are_in_flight_as_the_action_lists_say(name: str) -> None:
    """Of a fold one more is told on some ranks, where micro batches run out before its second chunk's turn."""
    for pp, vpp, micro_batches in SHAPES[name]:
        shape, ranks = columns(name, pp, vpp, micro_batches), np.arange(pp)
        late = waiting_chunks(*shape, ranks)
        looped = name == "zero-bubble"
        live = live_chunks(shape[0], shape[1], shape[2], shape[3], ranks)
        chunks, waiting = (late[0], late[1]) if looped else (live, 0 * ranks)
        turns = per_turn(shape[0], shape[1], shape[3], ranks)
        for rank, actions in enumerate(schedule_actions(name, pp, vpp, micro_batches)):
            found = at_weight_gradients(actions)
            for turn, again in product(range(1, vpp + 1), range(min(2, micro_batches))):
                of_turn = [n for done, mine, n in found if done == turn - 1 + again and mine == bool(again)]
                if not of_turn:
                    assert again, "a turn has a first backward"
                    assert turns[rank] == 1, "and a second one, unless the next turn comes after one"
                    continue
                left = np.asarray(micro_batches * vpp - (turn - 1) * turns[rank] - again - 1)
                others, put_off = left_behind(chunks[rank], waiting[rank], left)
                assert 0 <= others + put_off - max(of_turn) <= (not looped), (pp, vpp, micro_batches, rank, turn, again)
