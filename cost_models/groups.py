"""The communicators of each layout: which ranks they hold, and what a collective on them takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cost_models.collectives import collective_lines
from cost_models.topology import group_span

if TYPE_CHECKING:
    from cost_models.cluster import ClusterSpec
    from cost_models.layout import Column, Layouts

# (size, stride) pairs: the ranks of a group are all sums of a_i * stride_i with 0 <= a_i < size_i.
Axes = tuple[tuple["Column", "Column"], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Axes of each dimension's group, after the placement: neighbours first, tp innermost."""

    tp: Axes
    cp: Axes
    ep: Axes
    shard: Axes
    replica: Axes
    data: Axes
    expert_shard: Axes
    expert_replica: Axes
    pp: Axes
    world: Axes

    @classmethod
    def of(cls, layouts: Layouts) -> Groups:
        """Ranks count up along tp, cp, then dp and pp in the order of the placement."""
        x = layouts
        inner = x.tp * x.cp
        near = x.placement == 0
        dp_stride = np.where(near, inner, inner * x.pp)
        pp_stride = np.where(near, inner * x.dp, inner)
        shard = np.where(x.zero > 0, x.dp_shard, 1)
        shard_cp = np.where(x.zero > 0, x.cp, 1)
        one = np.ones_like(x.tp)
        tp, cp = (x.tp, one), (x.cp, x.tp)
        # Experts take the innermost ranks: first of tp, then cp, then dp.
        ep_tp = np.minimum(x.ep, x.tp)
        ep_cp = np.clip(x.ep // x.tp, 1, x.cp)
        ep_dp = np.maximum(x.ep // inner, 1)
        spread = x.ep > 1
        left_tp = np.where(spread, x.tp // ep_tp, 1)
        left_cp, left_dp = x.cp // ep_cp, x.dp // ep_dp
        left_shard = np.clip(shard // ep_dp, 1, None)
        sharded = x.zero > 0
        return cls(
            tp=(tp,),
            cp=(cp,),
            ep=((ep_tp, one), (ep_cp, x.tp), (ep_dp, dp_stride)),
            shard=((shard_cp, x.tp), (shard, dp_stride)),
            replica=((x.cp // shard_cp, x.tp), (x.dp // shard, dp_stride * shard)),
            data=(cp, (x.dp, dp_stride)),
            expert_shard=(
                (np.where(sharded, left_tp, 1), ep_tp),
                (np.where(sharded, left_cp, 1), x.tp * ep_cp),
                (np.where(sharded, left_shard, 1), dp_stride * ep_dp),
            ),
            expert_replica=(
                (np.where(sharded, 1, left_tp), ep_tp),
                (np.where(sharded, 1, left_cp), x.tp * ep_cp),
                (left_dp // left_shard, dp_stride * ep_dp * left_shard),
            ),
            # All ranks of a pipeline, not a pair: the slowest neighbours are those that a border of a node parts.
            pp=((x.pp, pp_stride),),
            world=((x.tp * x.cp * x.pp * x.dp, one),),
        )


class CollectiveClock:
    """Times collectives on the links that each group has, each distinct group looked up once.

    Args:
        n_devices: devices of the job; without it, groups beyond its last device count as well (a job of 3 devices in a
            node of 8 would be charged for the third group of 3, which straddles two nodes).
    """

    def __init__(self, cluster: ClusterSpec, algorithm: str = "auto", n_devices: int = 0) -> None:
        self._cluster = cluster
        self._algorithm = algorithm
        self._n_devices = n_devices
        self._groups: dict[int, tuple[Axes, np.ndarray, np.ndarray]] = {}
        self._costs: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}

    def seconds(self, kind: str, axes: Axes, n_bytes: Column) -> Column:
        """Seconds of one collective of `n_bytes` on the group of each layout; 0 for groups of one."""
        if not np.any(n_bytes):
            return np.zeros_like(n_bytes)
        which, alpha, beta = self._looked_up(kind, axes)
        best = alpha[which, 0] + n_bytes * beta[which, 0]
        for line in range(1, alpha.shape[1]):
            best = np.minimum(best, alpha[which, line] + n_bytes * beta[which, line])
        return np.where(np.asarray(n_bytes) > 0, best, 0.0)

    def _looked_up(self, kind: str, axes: Axes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each layout the index of its group, and alpha and beta of each group."""
        key = id(axes)
        if key not in self._groups:
            # The axes are kept with their groups: an id is only good while its object lives.
            self._groups[key] = (axes, *_distinct_groups(axes))
        _, keys, which = self._groups[key]
        if (key, kind) not in self._costs:
            self._costs[key, kind] = self._lines(kind, keys)
        return which, *self._costs[key, kind]

    def _lines(self, kind: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Alpha and beta by distinct group and line; padded with infinity."""
        lines = []
        for key in keys.tolist():
            pairs = tuple((size, stride) for size, stride in zip(key[::2], key[1::2], strict=True) if size > 1)
            if pairs:
                span = group_span(self._cluster, pairs, self._n_devices)
                lines.append(collective_lines(kind, span, self._cluster, self._algorithm))
            else:
                lines.append(())
        most = max(1, *map(len, lines))
        alpha, beta = np.full((len(keys), most), np.inf), np.zeros((len(keys), most))
        for row, options in enumerate(lines):
            for column, line in enumerate(options):
                alpha[row, column], beta[row, column] = line.alpha_s, line.seconds_per_byte
            if not options:
                alpha[row, 0] = 0.0
        return alpha, beta


def _distinct_groups(axes: Axes) -> tuple[np.ndarray, np.ndarray]:
    """Distinct groups as rows of sizes and strides, and for each layout the index of its row."""
    columns = np.broadcast_arrays(*(column for axis in axes for column in axis))
    code = np.zeros(columns[0].size, dtype=np.int64)
    for column in columns:
        values, index = np.unique(column, return_inverse=True)
        code = code * len(values) + index.reshape(-1)
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    keys = np.stack([column.reshape(-1)[first] for column in columns], axis=1)
    return keys, inverse.reshape(columns[0].shape)
