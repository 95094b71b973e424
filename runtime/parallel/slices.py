"""Which part of a whole parameter a rank holds, from mesh and placements alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor.placement_types import Placement

    from runtime.parallel.trainable import Whole


def local_slices(whole: Whole, coordinate: Sequence[int] | None) -> tuple[slice, ...]:
    """The part of `whole` that the rank at `coordinate` of its mesh holds, one slice an axis.

    Args:
        coordinate: of the mesh's dimensions; None where this process holds the whole.
    """
    if whole.mesh is None or coordinate is None:
        return tuple(slice(0, length) for length in whole.shape)
    return part_slices(whole.shape, tuple(whole.mesh.shape), whole.placements, coordinate)


def part_slices(
    shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> tuple[slice, ...]:
    """As `local_slices`, for a mesh of `sizes`.

    A strided shard is cut after the dimensions to its right: FSDP cuts what tp has left. Plain ones go left to right.
    """
    bounds = [(0, length) for length in shape]
    late = [hasattr(placement, "split_factor") for placement in placements]
    for dimension in sorted(range(len(placements)), key=lambda d: (late[d], d)):
        axis = getattr(placements[dimension], "dim", None)
        if axis is not None:
            start, stop = bounds[axis]
            bounds[axis] = _chunk(start, stop, sizes[dimension], coordinate[dimension])
    return tuple(slice(start, stop) for start, stop in bounds)


def _chunk(start: int, stop: int, parts: int, place: int) -> tuple[int, int]:
    """As `torch.chunk` cuts: full chunks first, then a rest, then nothing."""
    length = -(-(stop - start) // parts)
    first = min(start + place * length, stop)
    return first, min(first + length, stop)
