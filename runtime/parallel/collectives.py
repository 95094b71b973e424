"""Collectives on local tensors: rows are gathered, scattered and exchanged along the first axis.

Plain functions without gradients; the operators that use them say what their backward sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' rows, shape (n * group size, ...)."""
    return gather_rows_later(x, group)()


def gather_rows_later(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start the gather; calling the result waits for it."""
    size = dist.get_world_size(group)
    out = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    work = dist.all_gather_single(out, x.contiguous(), group=group, async_op=True)
    return lambda: _waited(work, out)


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum over ranks, shape (n / group size, ...)."""
    return scatter_sum_later(x, group)()


def scatter_sum_later(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start the reduce-scatter; calling the result waits for it."""
    size = dist.get_world_size(group)
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    work = dist.reduce_scatter_single(out, x.contiguous(), group=group, async_op=True)
    return lambda: _waited(work, out)


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, in place."""
    dist.all_reduce(x, group=group)
    return x


def sum_over_later(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start the sum in place; calling the result waits for it."""
    work = dist.all_reduce(x, group=group, async_op=True)
    return lambda: _waited(work, x)


def exchange(
    x: Tensor, group: dist.ProcessGroup, sent: list[int] | None = None, received: list[int] | None = None
) -> Tensor:
    """All-to-all of rows; without counts each rank gets an equal part."""
    rows = sum(received) if received is not None else x.shape[0]
    out = x.new_empty((rows, *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def _waited(work: dist.Work | None, out: Tensor) -> Tensor:
    if work is not None:
        work.wait()
    return out
