"""The messages of one rank: values, and the tally that they are counted in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cost_models.rank_grid import RankGrid

if TYPE_CHECKING:
    from cost_models.layout import Layout

WORLD = "world"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RankMessage:
    """All messages of one kind in one group during a step.

    Attributes:
        group: `tp`, `cp`, `ep`, `pp`, `dp`, `dp_shard`, `dp_replicate`, `expert_shard`, `expert_replicate`, `sequence`,
            `ends` or `world`.
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `send` or `recv`.
        n_bytes: of all of them. All-gather: output, reduce-scatter: input, otherwise the tensor.
        ranks: of the group.
    """

    group: str
    kind: str
    count: int
    n_bytes: int
    ranks: tuple[int, ...]


class RankGroups:
    """The groups of one rank by dimension."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self._grid, self._rank = RankGrid.of(layout), rank
        self.layout, self.at = layout, self._grid.coordinates(rank)

    def ranks(self, group: str) -> tuple[int, ...]:
        """Members of a group in their order."""
        place, axes = self._axes(group)
        return tuple(int(r) for r in place[tuple(axes)].reshape(-1))

    def size(self, group: str) -> int:
        """Members of a group."""
        return len(self.ranks(group))

    def place(self, group: str) -> int:
        """This rank's place in a group."""
        return self.ranks(group).index(self._rank)

    def mesh_of(self, *, expert: bool) -> str:
        """Prefix of the groups that hold copies and shards: experts have their own where ep is above 1."""
        return "expert" if expert and self.layout.ep > 1 else "dp"

    def _axes(self, group: str) -> tuple[np.ndarray, list[int | slice]]:
        """An array of ranks, and the index of this rank in it with the group's own axes left open."""
        whole = slice(None)
        if group == WORLD:
            return self._grid.ranks, [whole] * 4
        if group == "ends":
            at = self.at
            return self._grid.ranks[[0, -1]], [whole, at.dp, at.cp, at.tp]
        array, names = self._grid.ranks, ("pp", "dp", "cp", "tp")
        if group in {"dp_replicate", "dp_shard"}:
            array, names = self._grid.dense(), ("pp", "dp_replicate", "dp_shard", "tp")
        elif group in {"expert_replicate", "expert_shard", "ep"}:
            array, names = self._grid.experts(), ("pp", "expert_replicate", "expert_shard", "ep")
        own = [int(axis[0]) for axis in np.nonzero(array == self._rank)]
        opened = {"cp", "tp"} if group == "sequence" else {group}
        return array, [whole if name in opened else place for name, place in zip(names, own, strict=True)]


class Tally:
    """Counts messages; a group of one rank sends none."""

    def __init__(self, groups: RankGroups) -> None:
        self._groups = groups
        self._counts: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def add(self, group: str, kind: str, n_bytes: float, count: int = 1) -> None:
        """`count` messages of `n_bytes` each."""
        if count and n_bytes and self._groups.size(group) > 1:
            self._counts[group, kind] += count
            self._bytes[group, kind] += round(n_bytes * count)

    def found(self) -> tuple[RankMessage, ...]:
        """What was counted, in order."""
        return tuple(
            sorted(
                RankMessage(
                    group=group,
                    kind=kind,
                    count=count,
                    n_bytes=self._bytes[group, kind],
                    ranks=self._groups.ranks(group),
                )
                for (group, kind), count in self._counts.items()
            )
        )
