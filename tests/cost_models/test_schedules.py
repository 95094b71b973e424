"""Our action lists and conditions against torch's own, which the trainer runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from cost_models.errors import TitanPlanError
from cost_models.schedules import (
    SCHEDULE_CONDITIONS,
    SCHEDULES,
    Action,
    RankActions,
    schedule_actions,
    schedule_code,
    schedule_valid,
    stage_rank,
)

SINGLE = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}
MULTI = {
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zb-v": torch_schedules.ScheduleZBVZeroBubble,
}
SHAPES = [*product((2, 3, 4, 6), (1, 2, 3, 4), range(1, 17)), (5, 2, 24), (8, 3, 20), (8, 2, 9)]


def torch_multi(name: str, pp: int, vpp: int, micro_batches: int) -> tuple[RankActions, ...]:
    """The lists that torch computes when a schedule is built; it never calls its stages for that."""
    shared: dict[str, Any] = {"num_stages": pp * vpp, "group_size": pp, "group_rank": 0, "submod": None}
    stages = [SimpleNamespace(stage_index=pp * chunk, is_last=False, **shared) for chunk in range(vpp)]
    order = MULTI[name](stages, micro_batches).pipeline_order
    return tuple(
        tuple(
            Action(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in order[rank]
            if action is not None
        )
        for rank in range(pp)
    )


class RecordingStage:
    """Stands in for PipelineStage: torch's step loop runs on it and leaves its order in `actions`.

    The `pipeline_order` of torch's single-stage schedules is a drawing (its 1F1B starts the last rank at micro batch
    1), so the loop itself is what we compare with.
    """

    def __init__(self, rank: int, pp: int) -> None:
        self.stage_index, self.num_stages = rank, pp
        self.is_last, self.has_backward = rank == pp - 1, True
        self.actions: list[Action] = []

    def forward_one_chunk(self, micro: int, *_args: object, **_kwargs: object) -> None:
        self.actions.append(Action("F", self.stage_index, micro))

    def backward_one_chunk(self, micro: int, **_kwargs: object) -> None:
        self.actions.append(Action("B", self.stage_index, micro))

    def __getattr__(self, name: str) -> Callable[..., list[object]]:  # get_fwd_recv_ops and its like: no messages
        return lambda *_args, **_kwargs: []


def torch_single(name: str, pp: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> tuple[RankActions, ...]:
    lists = []
    for rank in range(pp):
        stage = RecordingStage(rank, pp)
        schedule = SINGLE[name](stage, micro_batches)
        for hook in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
            monkeypatch.setattr(schedule, hook, lambda *_args, **_kwargs: None)
        inputs = [()] * micro_batches
        schedule._step_microbatches(arg_mbs=inputs, kwarg_mbs=[{}] * micro_batches)
        lists.append(tuple(stage.actions))
    return tuple(lists)


def is_valid(name: str, pp: int, vpp: int, micro_batches: int) -> bool:
    shape = (np.array(value) for value in (schedule_code(name), pp, vpp, micro_batches))
    return bool(schedule_valid(*shape).item())


@pytest.mark.parametrize("name", MULTI)
def test_lists_of_multi_stage_schedules_are_those_of_torch(name: str) -> None:
    shapes = [shape for shape in SHAPES if is_valid(name, *shape)]
    assert len(shapes) > 30
    for shape in shapes:
        assert schedule_actions(name, *shape) == torch_multi(name, *shape), shape


@pytest.mark.parametrize("name", SINGLE)
def test_lists_of_single_stage_schedules_are_what_the_loop_of_torch_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pp, micro_batches in product((2, 3, 4, 6), (1, 2, 3, 4, 6, 7, 12)):
        if is_valid(name, pp, 1, micro_batches):
            assert schedule_actions(name, pp, 1, micro_batches) == torch_single(name, pp, micro_batches, monkeypatch)


@pytest.mark.parametrize("name", MULTI)
def test_torch_refuses_a_multi_stage_shape_exactly_where_we_do(name: str) -> None:
    ours_alone = set()
    for shape in SHAPES:
        try:
            torch_multi(name, *shape)
            taken = True
        except ValueError:
            taken = False
        assert taken or not is_valid(name, *shape), shape
        if taken and not is_valid(name, *shape):
            ours_alone.add(shape[1])
    # Our one extra rule: interleaving needs two chunks.
    assert ours_alone == ({1} if name == "interleaved" else set())


@pytest.mark.parametrize("name", SINGLE)
def test_torch_refuses_a_single_stage_shape_exactly_where_we_do(name: str) -> None:
    refused = 0
    for pp, micro_batches in product(range(2, 8), range(1, 10)):
        try:
            SINGLE[name](RecordingStage(0, pp), micro_batches)
            taken = True
        except ValueError:
            taken = False
        refused += not taken
        assert taken == is_valid(name, pp, 1, micro_batches)
        assert not is_valid(name, pp, 2, micro_batches)
    assert (refused > 0) == (name == "1f1b")


def test_one_rank_runs_each_micro_batch_forward_then_backward() -> None:
    expected = tuple(Action(kind, 0, micro) for micro in range(3) for kind in "FB")
    assert schedule_actions("none", 1, 1, 3) == (expected,)
    assert not is_valid("none", 2, 1, 3)
    assert not is_valid("1f1b", 1, 1, 3)


@pytest.mark.parametrize("name", SCHEDULES[1:])
def test_every_piece_of_work_runs_once_on_its_rank(name: str) -> None:
    shapes = [shape for shape in SHAPES if is_valid(name, *shape)]
    for pp, vpp, micro_batches in shapes:
        kinds = "FIW" if name.startswith("z") else "FB"
        expected = Counter(
            (stage_rank(name, pp, stage), Action(kind, stage, micro))
            for kind, stage, micro in product(kinds, range(pp * vpp), range(micro_batches))
        )
        lists = schedule_actions(name, pp, vpp, micro_batches)
        assert Counter((rank, action) for rank, own in enumerate(lists) for action in own) == expected


@pytest.mark.parametrize("name", ["zero-bubble", "zb-v"])
def test_the_first_stage_never_parts_its_two_gradients(name: str) -> None:
    """torch does nothing in I of stage 0 and all of the backward in its W, so the split there must cost no time."""
    for pp, vpp, micro_batches in SHAPES:
        if not is_valid(name, pp, vpp, micro_batches):
            continue
        own = schedule_actions(name, pp, vpp, micro_batches)[0]
        for here, then in pairwise(own):
            if here.kind == "I" and here.stage == 0:
                assert then == Action("W", 0, here.micro)


def test_conditions_stand_in_the_order_of_the_codes() -> None:
    assert tuple(condition.schedule for condition in SCHEDULE_CONDITIONS) == SCHEDULES
    assert [schedule_code(name) for name in SCHEDULES] == list(range(len(SCHEDULES)))


def test_valid_reads_columns() -> None:
    code = np.array([schedule_code(name) for name in ("1f1b", "1f1b", "interleaved", "interleaved", "zb-v", "zb-v")])
    pp, vpp = np.full(6, 4), np.array([1, 1, 2, 2, 2, 3])
    micro_batches = np.array([4, 3, 10, 9, 1, 8])
    expected = [True, False, True, False, True, False]
    assert schedule_valid(code, pp, vpp, micro_batches).tolist() == expected


def test_wrong_shapes_and_names_are_told() -> None:
    with pytest.raises(TitanPlanError, match=r"S401.*1f1b does not take pp 4 x vpp 1 with 3 micro batches"):
        schedule_actions("1f1b", 4, 1, 3)
    with pytest.raises(TitanPlanError, match="S401"):
        schedule_actions("none", 0, 1, 3)
    with pytest.raises(TitanPlanError, match=r"C611.*'dualpipe'"):
        schedule_actions("dualpipe", 4, 1, 8)
