"""What each pipeline schedule runs on each rank, in which order, and which shapes it takes.

The orders are those of torch.distributed.pipelining 2.13, which the trainer runs; a test holds the lists equal:
"gpipe" ScheduleGPipe, "1f1b" Schedule1F1B, "interleaved" ScheduleInterleaved1F1B, "zero-bubble"
ScheduleInterleavedZeroBubble, "zb-v" ScheduleZBVZeroBubble. "none" is the plain accumulation loop of pp = 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEDULES: tuple[str, ...] = ("none", "gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v")
NONE, GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, ZB_V = range(len(SCHEDULES))
"""Codes of the schedules in columns: the index into `SCHEDULES`."""
SPLIT_BACKWARD = frozenset({SCHEDULES[ZERO_BUBBLE], SCHEDULES[ZB_V]})
"""Names of those that compute gradients of weights apart from those of inputs."""

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = "F", "B", "I", "W"

IntColumn = NDArray[np.int64]
BoolColumn = NDArray[np.bool_]


class Action(NamedTuple):
    """One piece of work of one rank.

    Attributes:
        kind: F forward, B full backward, I gradient of the input, W gradient of the weights (B = I then W).
        stage: virtual stage, 0 holds the embedding, pp * vpp - 1 the head.
        micro: micro batch, from 0.
    """

    kind: str
    stage: int
    micro: int


RankActions = tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCondition:
    """Which shapes a schedule takes.

    Attributes:
        schedule: name, one of `SCHEDULES`.
        min_pp: fewest ranks; one rank has no pipeline and is called "none".
        max_pp: most ranks, None without limit.
        min_vpp: fewest virtual stages a rank.
        max_vpp: most virtual stages a rank, None without limit.
        full_pipeline: micro_batches >= pp is needed.
        even_rounds: micro_batches % max(1, micro_batches // pp) == 0 is needed.
        source: who refuses otherwise.
    """

    schedule: str
    min_pp: int
    max_pp: int | None
    min_vpp: int
    max_vpp: int | None
    full_pipeline: bool
    even_rounds: bool
    source: str


def _condition(
    code: int,
    vpp: tuple[int, int | None],
    source: str,
    *,
    pp: tuple[int, int | None] = (2, None),
    full_pipeline: bool = False,
    even_rounds: bool = False,
) -> ScheduleCondition:
    return ScheduleCondition(
        schedule=SCHEDULES[code],
        min_pp=pp[0],
        max_pp=pp[1],
        min_vpp=vpp[0],
        max_vpp=vpp[1],
        full_pipeline=full_pipeline,
        even_rounds=even_rounds,
        source=source,
    )


SCHEDULE_CONDITIONS: tuple[ScheduleCondition, ...] = (
    _condition(NONE, (1, 1), "no pipeline", pp=(1, 1)),
    _condition(GPIPE, (1, 1), "torch 2.13 PipelineScheduleSingle takes one stage"),
    _condition(ONE_F_ONE_B, (1, 1), "torch 2.13 Schedule1F1B.__init__", full_pipeline=True),
    # torch takes vpp = 1 too: the bubble of 1F1B with almost twice its live micro batches, so we do not offer it.
    _condition(INTERLEAVED, (2, None), "torch 2.13 ScheduleInterleaved1F1B.__init__", even_rounds=True),
    _condition(ZERO_BUBBLE, (1, None), "torch 2.13 ScheduleInterleavedZeroBubble.__init__", even_rounds=True),
    _condition(ZB_V, (2, 2), "torch 2.13 ScheduleZBVZeroBubble.__init__"),
)
"""In the order of `SCHEDULES`. The split backward of "zero-bubble" and "zb-v" also refuses torch.compile."""


def schedule_code(name: str) -> int:
    """The code of a schedule in columns."""
    if name not in SCHEDULES:
        raise TitanPlanError("C611", f"unknown pipeline schedule {name!r}", f"one of {', '.join(SCHEDULES)}")
    return SCHEDULES.index(name)


def schedule_valid(code: IntColumn, pp: IntColumn, vpp: IntColumn, micro_batches: IntColumn) -> BoolColumn:
    """Where the schedule takes this shape; columns of equal length (or scalars), result alike."""
    even = micro_batches % np.maximum(1, micro_batches // pp) == 0
    full = micro_batches >= pp
    valid = np.zeros(np.broadcast(code, pp, vpp, micro_batches).shape, dtype=np.bool_)
    for index, need in enumerate(SCHEDULE_CONDITIONS):
        fits = (pp >= need.min_pp) & (vpp >= need.min_vpp) & (micro_batches >= 1)
        if need.max_pp is not None:
            fits &= pp <= need.max_pp
        if need.max_vpp is not None:
            fits &= vpp <= need.max_vpp
        if need.full_pipeline:
            fits &= full
        if need.even_rounds:
            fits &= even
        valid |= (code == index) & fits
    return valid


def stage_rank(name: str, pp: int, stage: int) -> int:
    """The rank that holds a virtual stage: looped (stage % pp), or folded at the last rank for "zb-v"."""
    return 2 * pp - 1 - stage if name == "zb-v" and stage >= pp else stage % pp


def schedule_actions(name: str, pp: int, vpp: int, micro_batches: int) -> tuple[RankActions, ...]:
    """The actions of each rank in the order in which the trainer issues them."""
    code = schedule_code(name)
    shape = (np.asarray(value, dtype=np.int64) for value in (code, pp, vpp, micro_batches))
    if pp < 1 or not schedule_valid(*shape).item():
        need = SCHEDULE_CONDITIONS[code]
        raise TitanPlanError(
            "S401", f"schedule {name} does not take pp {pp} x vpp {vpp} with {micro_batches} micro batches", f"{need}"
        )
    return tuple(_rank_actions(code, pp, vpp, micro_batches, rank) for rank in range(pp))


def _rank_actions(code: int, pp: int, vpp: int, micro_batches: int, rank: int) -> RankActions:
    if code == GPIPE:
        order = [(FORWARD, rank)] * micro_batches + [(BACKWARD, rank)] * micro_batches
    elif code in (NONE, ONE_F_ONE_B):
        order = _one_f_one_b(pp, micro_batches, rank)
    elif code == ZB_V:
        order = _zb_v(pp, micro_batches, rank)
    else:
        order = _looped(pp, vpp, micro_batches, rank, split=code == ZERO_BUBBLE)
    return tuple(action for action in _numbered(order) if action.micro < micro_batches)


def _numbered(order: Iterable[tuple[str, int]]) -> Iterable[Action]:
    """Every schedule here runs the micro batches of a stage in order, so the count is the number."""
    seen: Counter[tuple[str, int]] = Counter()
    for kind, stage in order:
        yield Action(kind, stage, seen[kind, stage])
        seen[kind, stage] += 1


def _one_f_one_b(pp: int, micro_batches: int, rank: int) -> list[tuple[str, int]]:
    forward, backward = (FORWARD, rank), (BACKWARD, rank)
    warmup = min(micro_batches, pp - 1 - rank)
    return [forward] * warmup + [forward, backward] * (micro_batches - warmup) + [backward] * warmup


def _looped(pp: int, vpp: int, micro_batches: int, rank: int, *, split: bool) -> list[tuple[str, int]]:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2), and with `split` its zero-bubble form.

    Chunks take turns after each round of `per_round` micro batches. Warm-up grows by two forwards for each hop from
    the last rank, by one with a split backward, whose weight gradients then run `rank` backwards late.
    """
    per_round = micro_batches // max(1, micro_batches // pp)
    chunk_steps = micro_batches * vpp
    hops = pp - 1 - rank
    warmup = min((vpp - 1) * per_round + (hops if split else 2 * hops), chunk_steps)
    up = [rank + pp * (step // per_round % vpp) for step in range(chunk_steps)]
    down = [rank + pp * (vpp - 1 - step // per_round % vpp) for step in range(chunk_steps)]
    order = [(FORWARD, stage) for stage in up[:warmup]]
    for step, stage in enumerate(down):
        if warmup + step < chunk_steps:
            order.append((FORWARD, up[warmup + step]))
        order.append((INPUT_GRAD if split else BACKWARD, stage))
        if split and step >= rank:
            order.append((WEIGHT_GRAD, down[step - rank]))
    if split:
        order += [(WEIGHT_GRAD, stage) for stage in down[max(0, chunk_steps - rank) :]]
    return order


def _zb_v(pp: int, micro_batches: int, rank: int) -> list[tuple[str, int]]:
    """ZB-V (Qi et al. 2023, section 6) for at least 2 pp - 1 micro batches; the caller drops the absent ones."""
    total = max(micro_batches, 2 * pp - 1)
    first, second = rank, 2 * pp - 1 - rank
    forward_1, grad_1, weight_1 = (FORWARD, first), (INPUT_GRAD, first), (WEIGHT_GRAD, first)
    forward_2, grad_2, weight_2 = (FORWARD, second), (INPUT_GRAD, second), (WEIGHT_GRAD, second)
    hops = pp - rank
    with_forward = total - (2 * pp - 1 - rank)
    steady = [grad_1, weight_1, forward_2, grad_2, weight_2]
    return (
        [forward_1] * (2 * hops - 1)
        + [forward_2, forward_1] * rank
        + [forward_2, grad_2, weight_2] * hops
        + [forward_1, *steady] * with_forward
        + steady * (total - pp - with_forward)
        + [grad_1, grad_2] * rank
        + [grad_1, weight_1] * hops
        + [weight_2] * rank
        + [weight_1] * rank
    )
