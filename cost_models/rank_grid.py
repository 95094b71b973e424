"""Which rank stands where: ranks by dimension after the placement, and the groups that follow from it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cost_models.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where a rank stands in each dimension."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """Ranks by dimension. Pure arithmetic: a process group is not needed.

    Attributes:
        ranks: shape (pp, dp, cp, tp), whatever the placement.
    """

    layout: Layout
    ranks: np.ndarray

    @classmethod
    def of(cls, layout: Layout) -> RankGrid:
        """Ranks count up along tp, cp, then dp and pp in the order of the placement."""
        x, ranks = layout, np.arange(layout.devices)
        if x.placement == "tp-cp-dp-pp":
            return cls(layout=x, ranks=ranks.reshape(x.pp, x.dp, x.cp, x.tp))
        return cls(layout=x, ranks=ranks.reshape(x.dp, x.pp, x.cp, x.tp).transpose(1, 0, 2, 3))

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands."""
        pp, dp, cp, tp = (int(axis[0]) for axis in np.nonzero(self.ranks == rank))
        return Coordinates(pp=pp, dp=dp, cp=cp, tp=tp)

    def dense(self) -> np.ndarray:
        """Shape (pp, replicate, shard, tp): the cp ranks hold the same weights, so they shard along."""
        x = self.layout
        shard = x.dp_shard if x.zero else 1
        cp_shard, cp_copies = (x.cp, 1) if x.zero else (1, x.cp)
        split = self.ranks.reshape(x.pp, x.dp // shard, shard, cp_copies, cp_shard, x.tp)
        return split.transpose(0, 1, 3, 2, 4, 5).reshape(x.pp, x.dp // shard * cp_copies, shard * cp_shard, x.tp)

    def experts(self) -> np.ndarray:
        """Shape (pp, replicate, shard, ep): experts take tp ranks first, then cp, then dp."""
        x = self.layout
        in_tp = min(x.ep, x.tp)
        in_cp = min(max(x.ep // x.tp, 1), x.cp)
        in_dp = max(x.ep // (x.tp * x.cp), 1)
        shard = max(x.dp_shard // in_dp, 1) if x.zero else 1
        copies = x.dp // in_dp // shard
        split = self.ranks.reshape(x.pp, copies, shard, in_dp, x.cp // in_cp, in_cp, x.tp // in_tp, in_tp)
        # Order: pp, copies | shard over dp, cp, tp | ep over dp, cp, tp (innermost last).
        ordered = split.transpose(0, 1, 2, 4, 6, 3, 5, 7)
        left = shard * (x.cp // in_cp) * (x.tp // in_tp)
        grid = ordered.reshape(x.pp, copies, left, x.ep)
        return grid if x.zero else grid.reshape(x.pp, copies * left, 1, x.ep)
