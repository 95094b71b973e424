"""Collectives as HCCL runs them: which algorithm at which tier, and how the tiers follow each other (ascend.md 3.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cost_models.collective_algorithms import (
    FORMULAS,
    Cost,
    Level,
    ahc_all_reduce,
    direct_all_to_all_beta,
    is_power_of_two,
    members_of,
    pipeline_one_way,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cost_models.cluster import ClusterSpec

_ADAPTIVE: Final = ("mesh", "ring", "NHR", "H-D_R")
"""What HCCL compares by itself, the earlier one where two cost the same (ascend.md 3.1).

NB, NHR_V1 and AHC run between servers only when asked for.
"""
_PODS_ALWAYS_HALVING: Final = 8
"""From 8 superpods on, level 2 takes H-D_R whatever the number (HCCL_ALGO documentation)."""
_TWO_WAY: Final = ("all_reduce", "broadcast")

Named = tuple[str, Cost]


def hccl_lines(kind: str, levels: Sequence[Level], cluster: ClusterSpec, algorithm: str) -> list[Named]:
    """Return the algorithms that HCCL would compare for a collective, with their costs.

    `algorithm` is auto, or the name that HCCL_ALGO forces between servers; where it knows no such collective (pairwise
    all-reduce) or cannot run it (pipeline with one device per server), HCCL's own choice stands.
    """
    near = [level for level in levels if not level.far]
    far = [level for level in levels if level.far]
    nests_everywhere = any(tier.kind == "switch" and tier.devices for tier in cluster.tiers)
    if kind == "all_to_all":
        lines = _all_to_all(near, far, nests_everywhere)
        return [line for line in lines if line[0].endswith(algorithm)] or lines
    special = {"pipeline": _pipelined, "AHC": _ahc}
    if algorithm in special:
        forced = special[algorithm](kind, near, far)
        return forced or hccl_lines(kind, levels, cluster, "auto")
    tiered = _tiered(kind, near, far, algorithm, nests_everywhere)
    if any(_forces(level, kind, algorithm) for level in far) or len(levels) == 1:
        return tiered
    return [*tiered, *_pipelined(kind, near, far), ("flat ring", _flat_ring(kind, levels))]


def _tiered(kind: str, near: list[Level], far: list[Level], algorithm: str, nests_everywhere: bool) -> list[Named]:
    """Return the hierarchical algorithms.

    All-reduce: reduce-scatter inside, all-reduce across on the share of the bytes, all-gather inside; broadcast:
    scatter, broadcast, all-gather. On A2 and 910A reduce-scatter goes across servers FIRST and all-gather across LAST,
    so that each device carries whole servers' bytes over its RoCE port; only pipeline avoids that. A3 nests both ways.
    """
    if nests_everywhere or kind in _TWO_WAY or not (near and far):
        return _nested(kind, [*near, *far], algorithm)
    servers = members_of(far)
    return [
        (f"{inner} + {outer}", far_cost.then(near_cost, 1 / servers))
        for inner, near_cost in _nested(kind, near, algorithm)
        for outer, far_cost in _nested(kind, far, algorithm)
    ]


def _nested(kind: str, levels: list[Level], algorithm: str) -> list[Named]:
    """Return the costs of a kind over levels near to far, each outer level on the share of one inner block."""
    level, *outer = levels
    if not outer:
        return _single(kind, level, algorithm)
    passes = 2 if kind in _TWO_WAY else 1
    return [
        (f"{name} + {rest}", cost.times(passes, passes).then(outer_cost, 1 / level.blocks))
        for name, cost in _single("all_gather", level, algorithm)
        for rest, outer_cost in _nested(kind, outer, algorithm)
    ]


def _single(kind: str, level: Level, algorithm: str) -> list[Named]:
    """Return the algorithms that a tier offers to a kind."""
    a, b = level.tier.step_latency_s, level.tier.seconds_per_byte
    names = (algorithm,) if _forces(level, kind, algorithm) else _own_choice(level)
    return [(name, FORMULAS[_formula_of(name, level)][kind](level.blocks, a, b)) for name in names]


def _formula_of(name: str, level: Level) -> str:
    return "switch mesh" if name == "mesh" and level.tier.kind == "switch" else name


def _forces(level: Level, kind: str, algorithm: str) -> bool:
    return level.far and algorithm in level.tier.algorithms and kind in FORMULAS.get(algorithm, {})


def _own_choice(level: Level) -> tuple[str, ...]:
    """Return what HCCL compares or, where it only looks at the number of blocks, picks (ascend.md 3.1)."""
    if level.tier.selection == "cheapest":
        return tuple(name for name in _ADAPTIVE if name in level.tier.algorithms)
    many = level.tier.selection == "power_of_two_or_8" and level.blocks >= _PODS_ALWAYS_HALVING
    return ("H-D_R",) if many or is_power_of_two(level.blocks) else ("ring",)


def _flat_ring(kind: str, levels: Sequence[Level]) -> Cost:
    """Return one ring over all members: each step waits for the slowest link, of which a mesh gives a ring one."""
    a = max(level.tier.step_latency_s for level in levels)
    b = max(level.tier.seconds_per_byte for level in levels)
    return FORMULAS["ring"][kind](members_of(levels), a, b)


def _pipelined(kind: str, near: list[Level], far: list[Level]) -> list[Named]:
    """Return the pipeline between servers, which needs several devices per server and one tier between servers."""
    passes = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}.get(kind, 0)
    if not passes or not near or len(far) != 1 or "pipeline" not in far[0].tier.algorithms:
        return []
    tier, servers = far[0].tier, far[0].blocks
    inter = Cost(tier.step_latency_s, tier.seconds_per_byte / (servers * members_of(near)))
    return [
        (f"{name} + pipeline", pipeline_one_way(servers, inter, gather.times(1, 1 / servers)).times(passes, passes))
        for name, gather in _nested("all_gather", near, "auto")
    ]


def _ahc(kind: str, near: list[Level], far: list[Level]) -> list[Named]:
    """Return AHC over the outermost tier and all inside it; only an all-reduce formula is published."""
    *inner, outer = [*near, *far]
    if kind != "all_reduce" or not inner or not outer.far or "AHC" not in outer.tier.algorithms:
        return []
    slowest = Cost(
        max(level.tier.step_latency_s for level in inner), max(level.tier.seconds_per_byte for level in inner)
    )
    across = Cost(outer.tier.step_latency_s, outer.tier.seconds_per_byte)
    return [("AHC", ahc_all_reduce(members_of(inner), outer.blocks, slowest, across))]


def _all_to_all(near: list[Level], far: list[Level], grouped: bool) -> list[Named]:
    """Return the all-to-all.

    A3: grouped full mesh, at once inside a superpod, superpod by superpod beyond. A2, 910A: all-to-all inside, then
    pairwise between servers, or both overlapped as a pipeline.
    """
    if grouped or not far:
        levels = [*near, *far]
        steps = [(1 if level.tier.devices else level.blocks - 1) * level.tier.step_latency_s for level in levels]
        return [("full mesh", Cost(max(steps), direct_all_to_all_beta(levels)))]
    tier, servers = far[-1].tier, members_of(far)
    across = FORMULAS["pairwise"]["all_to_all"](servers, tier.step_latency_s, tier.seconds_per_byte)
    if not near:
        return [("pairwise", across)]
    inside = Cost(max(level.tier.step_latency_s for level in near), direct_all_to_all_beta(near))
    lines = [("full mesh + pairwise", inside.then(across))]
    if "pipeline" in tier.algorithms:
        step = Cost(tier.step_latency_s, tier.seconds_per_byte / servers)
        lines.append(("full mesh + pipeline", pipeline_one_way(servers, step, inside.times(1, 1 / servers))))
    return lines
