"""Step time, bubble and messages of a pipeline in closed form, over columns of layouts.

Each schedule of `cost_models.schedules` issues its work in a fixed order, so its step is the longest of a few paths
through that work. Time is counted in chunks: a chunk is one virtual stage, forward f, input gradient i, weight gradient
w (a rank's times over vpp), b = i + w, and c the p2p time. With h = pp - 1, n = micro_batches * vpp chunks a rank, and
rounds of `per_round` micro batches, every path is the rank's own n (f + i + w) plus a fill:

  gpipe        h (f + b + 2 c)
  1f1b         h (f + b + 2 c) + 2 c (m - 1 - ceil((m - 1) / pp)): each receive stalls, nothing hides it
  interleaved  h (f + b + 2 c) + (vpp - 1) [turn(f) + turn(b)], turn(x) = max(0, pp (x + c) - per_round x): a chunk's
               next turn waits until its first micro batch has been round all ranks
  zero-bubble  h max(f, i, f + i - w) + (vpp - 1) turn(f) at c = 0 and m >= pp
  zb-v         the longest of fourteen paths

`step_span_s` says where each is exact; tests hold it to the simulator. Sources: Narayanan et al. 2021
(arXiv 2104.04473), Qi et al. 2023 (arXiv 2401.10241), and the action lists of torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.pipeline_chunks import per_round
from cost_models.schedules import GPIPE, INTERLEAVED, ONE_F_ONE_B, ZB_V, ZERO_BUBBLE, IntColumn

if TYPE_CHECKING:
    from collections.abc import Callable

FloatColumn = NDArray[np.float64]
Paths = tuple[tuple[IntColumn | int, IntColumn | int, IntColumn | int, IntColumn | int], ...]
"""Each path as counts of forwards, input gradients, weight gradients and hops beyond the rank's own work."""


class ByRank(NamedTuple):
    """Seconds of one micro batch on the first rank, on each rank between, and on the last; columns.

    The first holds the embedding, the last the head and the loss. With pp = 2 `middle` is not read, with pp = 1 only
    `first` is.
    """

    first: FloatColumn
    middle: FloatColumn
    last: FloatColumn


class _Shape(NamedTuple):
    """Rows of one schedule: integers as columns, times per chunk."""

    pp: IntColumn
    vpp: IntColumn
    micro_batches: IntColumn
    f: FloatColumn
    i: FloatColumn
    w: FloatColumn
    c: FloatColumn


def step_span_s(
    schedule_code: IntColumn,
    pp: IntColumn,
    vpp: IntColumn,
    micro_batches: IntColumn,
    forward_s: FloatColumn,
    input_grad_s: FloatColumn,
    weight_grad_s: FloatColumn,
    p2p_s: FloatColumn,
) -> FloatColumn:
    """Seconds from the first forward to the end of the last backward of any rank, all ranks alike.

    Equal to the simulator, p2p included, in rows that `schedule_valid` takes:
      none, gpipe, 1f1b: always;
      interleaved: p2p_s <= min(forward_s, input_grad_s + weight_grad_s) / vpp;
      zero-bubble: 2 p2p_s <= weight_grad_s / vpp, and micro_batches >= pp or vpp = 1;
      zb-v: p2p_s <= min(forward_s, input_grad_s, weight_grad_s) / 2, and micro_batches >= 2 pp - 1 (or <= pp, p2p 0).
    Elsewhere an estimate; `tests/cost_models/test_pipeline.py` bounds its error.

    Args:
        schedule_code: index into `SCHEDULES`.
        pp: ranks.
        vpp: virtual stages a rank.
        micro_batches: of one step and one data-parallel replica.
        forward_s: of one micro batch through all chunks of a rank.
        input_grad_s: likewise.
        weight_grad_s: likewise.
        p2p_s: from the end of a chunk until its output is at the next rank. Links never queue.
    """
    work_s = micro_batches * (forward_s + input_grad_s + weight_grad_s)
    return work_s + bubble_s(schedule_code, pp, vpp, micro_batches, forward_s, input_grad_s, weight_grad_s, p2p_s)


def bubble_s(
    schedule_code: IntColumn,
    pp: IntColumn,
    vpp: IntColumn,
    micro_batches: IntColumn,
    forward_s: FloatColumn,
    input_grad_s: FloatColumn,
    weight_grad_s: FloatColumn,
    p2p_s: FloatColumn,
) -> FloatColumn:
    """Seconds of the step in which a rank does nothing; arguments and exactness as in `step_span_s`."""
    f, i, w = forward_s / vpp, input_grad_s / vpp, weight_grad_s / vpp
    return _fill_s(schedule_code, pp, vpp, micro_batches, f, i, w, p2p_s)


def _fill_s(
    code: IntColumn,
    pp: IntColumn,
    vpp: IntColumn,
    micro_batches: IntColumn,
    f: FloatColumn,
    i: FloatColumn,
    w: FloatColumn,
    c: FloatColumn,
) -> FloatColumn:
    if code.size and (code == code.flat[0]).all():
        # Columns of one schedule keep their own shapes: a search's blocks broadcast, and most terms are short.
        fill = _FILLS.get(int(code.flat[0]))
        return (
            fill(_Shape(pp, vpp, micro_batches, f, i, w, c)) if fill else np.zeros(np.broadcast(pp, f, i, w, c).shape)
        )
    columns = np.broadcast_arrays(code, pp, vpp, micro_batches, f, i, w, c)
    fill_s = np.zeros(columns[0].shape, dtype=np.float64)
    for index, fill in _FILLS.items():
        rows = columns[0] == index
        if rows.any():
            fill_s[rows] = fill(_Shape(*(column[rows] for column in columns[1:])))
    return fill_s


def _gpipe_fill_s(s: _Shape) -> FloatColumn:
    return (s.pp - 1) * (s.f + s.i + s.w + 2 * s.c)


def _one_f_one_b_fill_s(s: _Shape) -> FloatColumn:
    later = s.micro_batches - 1
    return _gpipe_fill_s(s) + 2 * s.c * (later - -(-later // s.pp))


def _turn_s(s: _Shape, path_s: FloatColumn, cover_s: FloatColumn) -> FloatColumn:
    """What the changes of chunk wait: the first micro batch goes round all ranks while a round is worked off."""
    wait_s = s.pp * (path_s + s.c) - per_round(s.pp, s.micro_batches) * cover_s
    return np.asarray((s.vpp - 1) * np.maximum(0.0, wait_s))


def _interleaved_fill_s(s: _Shape) -> FloatColumn:
    b = s.i + s.w
    round_size = per_round(s.pp, s.micro_batches)
    late_turn_s = np.maximum(0.0, s.pp * s.c - round_size * np.minimum(s.f, b))
    late_s = (s.vpp - 1) * late_turn_s + (s.pp - 1) * np.maximum(0.0, 2 * s.c - s.f - b)
    return _gpipe_fill_s(s) + _turn_s(s, s.f, s.f) + _turn_s(s, b, b) + (s.micro_batches // round_size - 1) * late_s


def _zero_bubble_fill_s(s: _Shape) -> FloatColumn:
    """Paths by what they run most of: forwards, input gradients, both; the last two only with micro_batches < pp.

    They were read off the critical paths of the simulator, as were those of zb-v.
    """
    hops, idle = s.pp - 1, (s.pp - s.micro_batches).clip(0)
    chunks = (s.vpp - 1) * s.micro_batches
    back_turn_s = _turn_s(s, s.i, s.i + s.w)
    done = np.minimum(hops, (s.micro_batches - 1).clip(0))
    zigzag = np.minimum(hops, (s.micro_batches - 2).clip(0))
    late = (s.vpp * hops * (s.micro_batches - s.pp) / s.pp - 1).clip(0)
    late_s = late * np.maximum(0.0, 2 * s.c - s.w)
    both_s = hops * (s.f + s.i) - done * s.w + 2 * (hops + zigzag) * s.c
    split_s = idle * (s.f + s.i) + np.minimum(idle, chunks) * s.w - s.w + (2 * hops + idle) * s.c
    starved = hops + (s.vpp - 1) * (s.pp - 2 * s.micro_batches)
    paths = (
        hops * s.f + idle * s.i + (hops + idle + 2 * zigzag) * s.c,
        idle * s.f + hops * s.i + 2 * hops * s.c + back_turn_s,
        both_s + late_s + back_turn_s,
        np.where(idle * chunks > 0, split_s, 0.0),
        np.where(idle * chunks > 0, hops * s.f + starved * s.i + (2 * hops + s.pp * (s.vpp - 1)) * s.c, 0.0),
    )
    return np.asarray(np.maximum.reduce(paths) + _turn_s(s, s.f, s.f))


def _zb_v_fill_s(s: _Shape) -> FloatColumn:
    full_s, short_s = _longest_s(s, _zb_v_full(s)), _longest_s(s, _zb_v_short(s))
    known = [s.micro_batches >= 2 * s.pp - 1, s.micro_batches <= s.pp]
    return np.select(known, [full_s, short_s], np.maximum(full_s, short_s))


def _zb_v_short(s: _Shape) -> Paths:
    """At most pp micro batches."""
    h = s.pp - 1
    idle = (s.pp - s.micro_batches).clip(0)
    m = np.minimum(s.micro_batches, s.pp) - 1
    return (
        (2 * idle, 2 * h, 0, 4 * h),
        (h + idle, h + idle, 0, 4 * h),
        (2 * h, 2 * idle, -2 * m, 4 * h),
        (2 * h, 2 * h - 3 * m, -m, 4 * h),
    )


def _zb_v_full(s: _Shape) -> Paths:
    """2 pp - 1 micro batches or more."""
    h, p = s.pp - 1, s.pp
    return (
        (0, 1, p - 2, 3 * h),
        (1, 0, p - 2, 3 * h - 2),
        (0, h, 0, 5 * h - 2),
        (h - 1, 1, 0, 5 * h - 2),
        (h, 0, -1, 5 * h),
        (0, h, -1, 5 * h),
        (h, h, 1 - 2 * p, 6 * h),
        (0, 2 * h, 1 - 2 * p, 6 * h),
        (0, 2 * h, -2 * h, 6 * h - 2),
        (h - 1, h + 1, -2 * h, 6 * h - 2),
        (2 * h, 0, 1 - 2 * p, 4 * h),
        (2 * h, -h, -1, 3 * h),
        (2 * h - 1, 2 - p, 0, 3 * h - 2),
        (2 * h - 1, 1, -2 * h, 4 * h - 2),
    )


def _longest_s(s: _Shape, paths: Paths) -> FloatColumn:
    return np.asarray(np.maximum.reduce([a * s.f + b * s.i + d * s.w + e * s.c for a, b, d, e in paths]))


_FILLS: dict[int, Callable[[_Shape], FloatColumn]] = {
    GPIPE: _gpipe_fill_s,
    ONE_F_ONE_B: _one_f_one_b_fill_s,
    INTERLEAVED: _interleaved_fill_s,
    ZERO_BUBBLE: _zero_bubble_fill_s,
    ZB_V: _zb_v_fill_s,
}


def step_span_unequal_s(
    schedule_code: IntColumn,
    pp: IntColumn,
    vpp: IntColumn,
    micro_batches: IntColumn,
    forward_s: ByRank,
    input_grad_s: ByRank,
    weight_grad_s: ByRank,
    p2p_s: FloatColumn,
) -> FloatColumn:
    """Seconds of a step whose first and last rank differ from those between.

    A rank is busy for micro_batches times its own time and waits for the fill of the others, taken with their mean
    times: the largest such sum of any rank. Equal to `step_span_s` where all ranks are alike, exact for gpipe whose
    forward and backward are slowest on one rank, else up to 20 % too long (bounded by a test; mean 1 to 3 %).
    """
    between = np.maximum(pp - 2, 0)
    span_s = np.zeros(np.broadcast(pp, micro_batches, p2p_s, *forward_s).shape)
    for rank, present in enumerate((pp > 0, pp > 2, pp > 1)):
        own_s = forward_s[rank] + input_grad_s[rank] + weight_grad_s[rank]
        f, i, w = (
            (times.first + between * times.middle + (pp > 1) * times.last - times[rank]) / np.maximum(1, pp - 1) / vpp
            for times in (forward_s, input_grad_s, weight_grad_s)
        )
        rank_span_s = micro_batches * own_s + _fill_s(schedule_code, pp, vpp, micro_batches, f, i, w, p2p_s)
        span_s = np.where(present, np.maximum(span_s, rank_span_s), span_s)
    return span_s


def p2p_messages(
    schedule_code: IntColumn, pp: IntColumn, vpp: IntColumn, micro_batches: IntColumn, rank: IntColumn
) -> IntColumn:
    """Messages that a rank sends plus those that it receives in a step, each one micro batch at a stage boundary.

    A chunk receives and sends a forward and a backward, without the outer ends of the model and, in "zb-v", without
    the turn on the last rank.
    """
    ends = (rank == 0).astype(np.int64) + (rank == pp - 1)
    sides = 2 * vpp - np.where(schedule_code == ZB_V, 2 * ends, ends)
    return np.where(pp == 1, 0, 2 * micro_batches * sides)
