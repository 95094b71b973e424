"""What a collective costs: straight lines over bytes, one for each algorithm that the library would compare.

Bytes: all_reduce and broadcast the tensor, all_gather the OUTPUT, reduce_scatter the INPUT, all_to_all the whole send
buffer of one rank with its own share, send_recv the message. Times are of one collective alone on the links that its
group has while the other groups of the same partition run too (each device drives its own port).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, overload

import numpy as np

from cost_models.collective_algorithms import Cost, Level
from cost_models.errors import TitanPlanError
from cost_models.hccl_collectives import hccl_lines
from cost_models.nccl_collectives import gloo_lines, nccl_lines

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cost_models.cluster import ClusterSpec
    from cost_models.topology import GroupSpan

KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


@dataclass(frozen=True, slots=True)
class Line:
    """One algorithm: n bytes take `alpha_s + n * seconds_per_byte`."""

    algorithm: str
    """Near tier first, e.g. `mesh + NHR`."""
    alpha_s: float
    seconds_per_byte: float


@lru_cache(maxsize=65536)
def collective_lines(kind: str, span: GroupSpan, cluster: ClusterSpec, algorithm: str = "auto") -> tuple[Line, ...]:
    """Return the lines whose minimum is the time of a collective; () for a group of one.

    Args:
        kind: one of `KINDS`.
        span: where the members sit, from `topology.group_span`.
        cluster: the cluster.
        algorithm: `auto`, or the algorithm forced between nodes (HCCL_ALGO level1, NCCL_ALGO), in any case of letters.
    """
    if kind not in KINDS:
        raise TitanPlanError("C611", f"unknown collective {kind!r}", f"one of {', '.join(KINDS)}")
    name = algorithm_name(cluster, algorithm)
    far_from = cluster.devices_per_node
    levels = tuple(
        Level(tier, blocks, far=not 0 < tier.devices <= far_from)
        for tier, blocks in zip(cluster.tiers, span.blocks, strict=True)
        if blocks > 1
    )
    if not levels:
        return ()
    return _cheapest(_named_costs(kind, levels, cluster, name))


def _named_costs(kind: str, levels: tuple[Level, ...], cluster: ClusterSpec, algorithm: str) -> list[tuple[str, Cost]]:
    if kind == "send_recv":
        # The slowest pair of neighbours is the one that crosses the farthest tier; in a mesh it has ONE link.
        tier = levels[-1].tier
        return [("direct", Cost(tier.step_latency_s, tier.seconds_per_byte))]
    if cluster.collective_library == "hccl":
        return hccl_lines(kind, levels, cluster, algorithm)
    if cluster.collective_library == "nccl":
        return nccl_lines(kind, levels, algorithm)
    return gloo_lines(kind, levels)


def _cheapest(named: list[tuple[str, Cost]]) -> tuple[Line, ...]:
    """Drop the lines that another one beats at every size."""
    kept: list[Line] = []
    for name, cost in sorted(named, key=lambda line: line[1]):
        if not kept or cost.seconds_per_byte < kept[-1].seconds_per_byte:
            kept.append(Line(name, cost.alpha_s, cost.seconds_per_byte))
    return tuple(kept)


def algorithm_name(cluster: ClusterSpec, algorithm: str) -> str:
    """Return the library's spelling of a forced algorithm."""
    if algorithm == "auto":
        return algorithm
    known = {
        name.lower(): name
        for tier in cluster.tiers
        if not 0 < tier.devices <= cluster.devices_per_node or len(cluster.tiers) == 1
        for name in tier.algorithms
    }
    if algorithm.lower() not in known and algorithm.lower() != "auto":
        raise TitanPlanError(
            "T309",
            f"{cluster.collective_library} on {cluster.name} has no algorithm {algorithm!r} between nodes",
            f"use auto, {', '.join(known.values())}",
        )
    return known.get(algorithm.lower(), "auto")


@overload
def collective_time_s(lines: tuple[Line, ...], n_bytes: float) -> float: ...
@overload
def collective_time_s(lines: tuple[Line, ...], n_bytes: NDArray[np.generic]) -> NDArray[np.float64]: ...
def collective_time_s(lines: tuple[Line, ...], n_bytes: float | NDArray[np.generic]) -> float | NDArray[np.float64]:
    """Return the time of the cheapest line, s; 0 for no bytes and for a group of one."""
    if isinstance(n_bytes, np.ndarray):
        return _times_s(lines, n_bytes.astype(np.float64))
    if not lines or n_bytes <= 0:
        return 0.0
    return float(min(line.alpha_s + n_bytes * line.seconds_per_byte for line in lines))


def _times_s(lines: tuple[Line, ...], n_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
    if not lines:
        return np.zeros_like(n_bytes)
    cheapest = lines[0].alpha_s + n_bytes * lines[0].seconds_per_byte
    for line in lines[1:]:
        np.minimum(cheapest, line.alpha_s + n_bytes * line.seconds_per_byte, out=cheapest)
    return np.where(n_bytes > 0, cheapest, 0.0)


def algorithm_used(lines: tuple[Line, ...], n_bytes: float) -> str:
    """Return the name of the cheapest line; `none` for a group of one."""
    if not lines:
        return "none"
    return min(lines, key=lambda line: line.alpha_s + n_bytes * line.seconds_per_byte).algorithm
