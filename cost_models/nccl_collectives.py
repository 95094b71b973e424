"""Collectives as NCCL runs them on switches: ring and tree over all tiers at once, each rail of a node in use.

Latencies and ratios follow NCCL's own estimate, `ncclTopoTuneModel` in src/graph/tuning.cc (recall: no stored source
read). gloo on CPU ranks is the ring without rails and without the short protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cost_models.collective_algorithms import (
    FORMULAS,
    Cost,
    Level,
    direct_all_to_all_beta,
    log2_ceil,
    members_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

Named = tuple[str, Cost]

_TREE_BANDWIDTH_SHARE: Final = 0.92
"""Of the ring's bandwidth, in NCCL's tuning model."""
_SHORT_PROTOCOL_BYTES: Final = 2.0
"""LL sends a flag with every word: twice the bytes, and no ramp."""
_PEERS_AT_ONCE: Final = 8
"""Point-to-point transfers that one round of an all-to-all starts (recall, low)."""


def nccl_lines(kind: str, levels: Sequence[Level], algorithm: str) -> list[Named]:
    """Return ring and tree (all-reduce only), each with the long protocol and the short one (LL)."""
    if kind == "all_to_all":
        rounds = -(-(members_of(levels) - 1) // _PEERS_AT_ONCE)
        slowest = max(level.tier.step_latency_s for level in levels)
        return [("pairwise", Cost(rounds * slowest, direct_all_to_all_beta(levels)))]
    beta = 1 / rail_bandwidth(levels)
    long_steps = [level.tier.step_latency_s for level in levels]
    short_steps = [level.tier.latency_s for level in levels]
    lines: list[Named] = []
    if algorithm != "tree" or kind != "all_reduce":
        lines.append(("ring", _ring(kind, levels, long_steps, beta)))
        lines.append(("ring (LL)", _ring(kind, levels, short_steps, _SHORT_PROTOCOL_BYTES * beta)))
    if algorithm != "ring" and kind == "all_reduce":
        tree_beta = 2 * beta / _TREE_BANDWIDTH_SHARE
        lines.append(("tree", Cost(_tree_alpha(levels, long_steps), tree_beta)))
        lines.append(("tree (LL)", Cost(_tree_alpha(levels, short_steps), _SHORT_PROTOCOL_BYTES * tree_beta)))
    return lines


def gloo_lines(kind: str, levels: Sequence[Level]) -> list[Named]:
    """Return gloo's ring; its all-to-all is pairwise."""
    tier, ranks = levels[0].tier, members_of(levels)
    name = "pairwise" if kind == "all_to_all" else "ring"
    return [(name, FORMULAS[name][kind](ranks, tier.step_latency_s, tier.seconds_per_byte))]


def rail_bandwidth(levels: Sequence[Level]) -> float:
    """Return what the slowest tier carries of the rings, bytes/s: at an outer tier every member of a block has a port.

    Eight GPUs with a 50 GB/s port each make 400 GB/s between nodes; one member a node has its own 50.
    """
    slowest, members = float("inf"), 1
    for level in levels:
        slowest = min(slowest, level.bandwidth_bytes_per_s * members)
        members *= level.blocks
    return slowest


def _ring(kind: str, levels: Sequence[Level], steps: list[float], beta: float) -> Cost:
    """Return a ring whose pieces follow each other: latency adds up over the hops of one piece, bytes over one link."""
    ranks = members_of(levels)
    once = sum(hops * step for hops, step in zip(_ring_hops(levels), steps, strict=True))
    if kind == "broadcast":
        return Cost(once, beta)
    passes = 2 if kind == "all_reduce" else 1
    share = passes * (ranks - 1) / ranks
    return Cost(share * once, share * beta)


def _ring_hops(levels: Sequence[Level]) -> list[int]:
    """Return how many hops of the closed ring cross each tier; together they are the number of ranks."""
    blocks = members_of(levels)
    hops = []
    for level in levels:
        joined = blocks // level.blocks
        hops.append(blocks - joined)
        blocks = joined
    hops[-1] += 1
    return hops


def _tree_alpha(levels: Sequence[Level], steps: list[float]) -> float:
    """Return a chain inside the node and a double binary tree over nodes, up and down."""
    near = [level.blocks - 1 for level in levels if not level.far]
    far = [log2_ceil(level.blocks) for level in levels if level.far]
    return 2 * sum(depth * step for depth, step in zip([*near, *far], steps, strict=True))
