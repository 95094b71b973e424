"""Virtual stages whose activations or weights a pipeline rank holds at once, in closed form over columns of layouts.

A chunk is one virtual stage, and each schedule of `cost_models.schedules` issues its work in a fixed order: what is
alive follows from that order alone, never from times. Tests count it in the action lists.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules import ZB_V, ZERO_BUBBLE, IntColumn

FloatColumn = NDArray[np.float64]


def live_chunks(
    schedule_code: IntColumn,
    pp: IntColumn,
    vpp: IntColumn,
    micro_batches: IntColumn,
    rank: IntColumn,
    freed_by_input_grad: float = 0.0,
) -> FloatColumn:
    """Peak number of (chunk, micro batch) whose activations a rank keeps; each is 1 / vpp of the rank's layers.

    Equal to `pipeline_simulator.peak_live` of equal chunks. It depends on the order of issue alone, never on times.
    `freed_by_input_grad` is the share that the input gradient of a split backward frees; only "zero-bubble" runs
    forwards between the two halves of a backward.
    """
    all_chunks = micro_batches * vpp
    turns, hops = (vpp - 1) * per_round(pp, micro_batches), pp - 1 - rank
    warmup = np.minimum(all_chunks, turns + hops)
    delayed = np.minimum(rank, np.maximum(0, all_chunks - warmup - 1)) * (1.0 - freed_by_input_grad)
    by_code = (
        np.ones_like(all_chunks),
        micro_batches,
        np.minimum(micro_batches, hops + 1),
        np.minimum(all_chunks, turns + 2 * hops + 1),
        np.minimum(all_chunks, warmup + 1 + delayed),
        np.minimum(micro_batches, 2 * pp - 1 - rank) + np.minimum(micro_batches, rank + 1),
    )
    return np.choose(schedule_code, by_code).astype(np.float64)


def waiting_chunks(
    schedule_code: IntColumn, pp: IntColumn, vpp: IntColumn, micro_batches: IntColumn, rank: IntColumn
) -> tuple[IntColumn, IntColumn]:
    """Where a split backward leaves most weight gradients behind: (chunk, micro batch) with activations, and waiting.

    "zero-bubble" computes them `rank` backwards late; "zb-v" puts off those of its last micro batches, of both chunks.
    Other schedules have none waiting, and (0, 0).
    """
    all_chunks, hops = micro_batches * vpp, pp - 1 - rank
    warmup = np.minimum(all_chunks, (vpp - 1) * per_round(pp, micro_batches) + hops)
    late = np.minimum(rank, all_chunks - 1)
    total = np.maximum(micro_batches, 2 * pp - 1)
    put_off = micro_batches - (total - pp)  # micro batches of the first chunk whose weight gradients are put off
    folded_late = np.clip(put_off, 0, rank) + np.clip(micro_batches - (total - rank), 0, rank)
    # Behind them come more backwards of the first chunk; without these the last one put off does not wait for itself.
    behind = np.clip(put_off - rank, 0, hops + 1)
    folded_late = np.where(behind > 0, folded_late, np.maximum(folded_late - 1, 0))
    looped, folded = schedule_code == ZERO_BUBBLE, schedule_code == ZB_V
    waiting = np.where(looped, late, np.where(folded, folded_late, 0))
    alive = np.where(looped, np.minimum(warmup + 1, all_chunks - late), np.maximum(behind, 1))
    return np.where(looped | folded, alive, 0), waiting


def gathered_chunks(schedule_code: IntColumn, pp: IntColumn, vpp: IntColumn, rank: IntColumn) -> IntColumn:
    """Chunks with gathered weights at once, where each weight gradient of a split backward frees its own chunk's.

    Of the schedules that split backward, once all chunks have had weight gradients: in a fold the one in backward
    alone, until weight gradients are put off; else also the one in forward, which on the last rank is the same, and one
    between rounds, which some ranks of three and more chunks do not have.
    """
    looped = np.minimum(vpp, 3) - ((rank == pp - 1) & (vpp > 1))
    return np.asarray(np.where(schedule_code == ZB_V, 1, looped))


def per_round(pp: IntColumn, micro_batches: IntColumn) -> IntColumn:
    """Micro batches that a chunk of an interleaved schedule takes before the next chunk's turn."""
    return micro_batches // np.maximum(1, micro_batches // pp)


def per_turn(schedule_code: IntColumn, pp: IntColumn, micro_batches: IntColumn, rank: IntColumn) -> IntColumn:
    """Backwards of one chunk before the next one's; those of a fold take turns after so many."""
    folded = np.minimum(pp - rank, micro_batches)
    return np.asarray(np.where(schedule_code == ZB_V, folded, per_round(pp, micro_batches)))


def left_behind(chunks: FloatColumn, waiting: IntColumn, left: IntColumn) -> tuple[FloatColumn, IntColumn]:
    """Others at the weight gradients of a chunk of a split backward: with activations, and waiting for theirs.

    Args:
        chunks: at once with activations at the most. waiting: those that wait all the time.
        left: weight gradients that are still to come behind these.
    """
    late = np.clip(waiting, 0, left)
    return np.clip(chunks - 1, 0, left - late), late
