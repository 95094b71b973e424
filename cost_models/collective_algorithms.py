"""What one collective algorithm costs on equal links: the alpha-beta formulas, one function each.

Source of the HCCL ones: "coll_algo_intro" of the HCCL user guide (github hicann/hccl, docs/zh), ascend.md 3.2. All take
p ranks (or equal blocks of ranks), alpha `a` seconds a step and beta `b` seconds a byte of ONE link, and return alpha
and beta of the whole: the time for n bytes is alpha + n * beta. n is the tensor of an all-reduce or broadcast, the
input of a reduce-scatter, the output of an all-gather, the whole send buffer of an all-to-all.
Gamma, the cost of the addition itself, is left out: reductions run inline on the SDMA (ascend.md 3.1) or beside copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from cost_models.cluster import TierSpec

AIV_LINK_SHARE: Final = 0.65 / 0.85
"""What the vector engine reaches of the SDMA's link utilisation (HCCL cost_table.cc for the 950, ascend.md 3.2)."""


class Cost(NamedTuple):
    """A straight line: `alpha_s + bytes * seconds_per_byte`."""

    alpha_s: float
    seconds_per_byte: float

    def then(self, other: Cost, share: float = 1.0) -> Cost:
        """Return the cost of this phase followed by another one on a share of the bytes."""
        return Cost(self.alpha_s + other.alpha_s, self.seconds_per_byte + share * other.seconds_per_byte)

    def times(self, alpha: float, beta: float) -> Cost:
        """Return the cost with both parts scaled."""
        return Cost(alpha * self.alpha_s, beta * self.seconds_per_byte)


class Level(NamedTuple):
    """A tier that a group uses."""

    tier: TierSpec
    blocks: int
    """How many blocks of the tier inside it this tier joins, 2 or more."""
    far: bool
    """Whether the tier lies between nodes."""

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """What one device reaches here: k - 1 links of a mesh, its port elsewhere."""
        links = self.blocks - 1 if self.tier.kind == "mesh" else 1
        return links * self.tier.reachable_bandwidth_bytes_per_s


Formula = Callable[[int, float, float], Cost]


def members_of(levels: Sequence[Level]) -> int:
    """Return how many ranks the levels join."""
    return math.prod(level.blocks for level in levels)


def log2_ceil(p: int) -> int:
    """Return ceil(log2(p)), exactly."""
    return (p - 1).bit_length()


def is_power_of_two(p: int) -> bool:
    """Tell whether p = 2^k."""
    return p & (p - 1) == 0


def mesh_one_way(p: int, a: float, b: float) -> Cost:
    """Mesh reduce-scatter, all-gather, scatter, all-to-all: a + n b / p; the p-1 links of a device work at once."""
    return Cost(a, b / p)


def mesh_two_way(p: int, a: float, b: float) -> Cost:
    """Mesh all-reduce and broadcast: 2 a + 2 n b / p."""
    return mesh_one_way(p, a, b).times(2, 2)


def switch_mesh_one_way(p: int, a: float, b: float) -> Cost:
    """One step to all peers through one port, by the vector engine (AIV; A3's way for small data, ascend.md 3.1)."""
    return Cost(a, (p - 1) / p * b / AIV_LINK_SHARE)


def switch_mesh_two_way(p: int, a: float, b: float) -> Cost:
    """All-reduce and broadcast in two such steps."""
    return switch_mesh_one_way(p, a, b).times(2, 2)


def ring_one_way(p: int, a: float, b: float) -> Cost:
    """Ring reduce-scatter, all-gather, scatter: (p-1) a + (p-1)/p n b."""
    return Cost((p - 1) * a, (p - 1) / p * b)


def ring_all_reduce(p: int, a: float, b: float) -> Cost:
    """Ring all-reduce: 2 (p-1) a + 2 (p-1)/p n b."""
    return ring_one_way(p, a, b).times(2, 2)


def ring_broadcast(p: int, a: float, b: float) -> Cost:
    """Ring broadcast, not cut into pieces: (p-1) (a + n b)."""
    return Cost((p - 1) * a, (p - 1) * b)


def nhr_one_way(p: int, a: float, b: float) -> Cost:
    """NHR and NB reduce-scatter, all-gather, scatter: ceil(log2 p) a + (p-1)/p n b, for any p."""
    return Cost(log2_ceil(p) * a, (p - 1) / p * b)


def nhr_two_way(p: int, a: float, b: float) -> Cost:
    """NHR and NB all-reduce and broadcast: twice the one-way cost."""
    return nhr_one_way(p, a, b).times(2, 2)


def rhd_one_way(p: int, a: float, b: float) -> Cost:
    """Recursive halving-doubling (H-D_R) reduce-scatter and all-gather.

    p = 2^k: k a + (p-1)/p n b. Otherwise, with F = floor(log2 p) and S = sum of ceil(p / 2^i) for i = 1..F, the ranks
    over 2^F first hand all they have to a partner and get their part at the end: (a + n b) + (F a + S n b / p) +
    (a + n b / p).
    """
    if is_power_of_two(p):
        return Cost(log2_ceil(p) * a, (p - 1) / p * b)
    floor = p.bit_length() - 1
    pieces = sum(-(-p // 2**i) for i in range(1, floor + 1))
    return Cost((floor + 2) * a, (1 + (pieces + 1) / p) * b)


def rhd_all_reduce(p: int, a: float, b: float) -> Cost:
    """H-D_R all-reduce: 2 k a + 2 (p-1)/p n b for p = 2^k, else (2F+2) a + (2 (q-1)/q + 2) n b with q = 2^F."""
    if is_power_of_two(p):
        return rhd_one_way(p, a, b).times(2, 2)
    floor = p.bit_length() - 1
    q = 2**floor
    return Cost((2 * floor + 2) * a, (2 * (q - 1) / q + 2) * b)


def rhd_broadcast(p: int, a: float, b: float) -> Cost:
    """H-D_R broadcast, a tree of whole messages: ceil(log2 p) (a + n b)."""
    return Cost(log2_ceil(p) * a, log2_ceil(p) * b)


def pairwise_all_to_all(p: int, a: float, b: float) -> Cost:
    """Pairwise all-to-all of equal parts: (p-1) a + (p-1)/p n b."""
    return Cost((p - 1) * a, (p - 1) / p * b)


def pipeline_one_way(servers: int, inter: Cost, intra: Cost) -> Cost:
    """Pipeline between servers: max(inter, intra) (P-1) + intra.

    In the guide's words max(s/p b_inter + a_inter, s/p b_intra + a_intra) (P-1) + s/p b_intra + a_intra; `inter` and
    `intra` are the costs of one step with beta for a byte of the whole s. The maximum of two lines is not a line: the
    larger alpha and the larger beta are an upper bound of it, and exact where one side has both, as RoCE has.
    """
    steps = servers - 1
    slower = Cost(max(inter.alpha_s, intra.alpha_s), max(inter.seconds_per_byte, intra.seconds_per_byte))
    return intra.then(slower.times(steps, steps))


def direct_all_to_all_beta(levels: Sequence[Level]) -> float:
    """Return seconds a byte where each rank sends straight to each other one.

    A tier carries the parts for the peers that are no nearer. Tiers work at once, but those of one port share it.
    """
    ranks, members = members_of(levels), 1
    by_port: dict[str, float] = {}
    for level in levels:
        share = (level.blocks - 1) * members / ranks
        port = level.tier.port or level.tier.name
        by_port[port] = by_port.get(port, 0.0) + share / level.bandwidth_bytes_per_s
        members *= level.blocks
    return max(by_port.values())


def ahc_all_reduce(members: int, groups: int, inner: Cost, outer: Cost) -> Cost:
    """AHC all-reduce of G groups of m, NB on both levels, which is the formula of the guide with C b = b_outer.

    2 (ceil log2 m + ceil log2 G) a + 2 ((m-1)/m + (G-1) C / (G m)) n b. The guide labels the row reduce-scatter; text
    and factor 2 say all-reduce (ascend.md 3.2, medium). Each level keeps its own alpha here.
    """
    inside = nhr_two_way(members, inner.alpha_s, inner.seconds_per_byte)
    return inside.then(nhr_two_way(groups, outer.alpha_s, outer.seconds_per_byte), 1 / members)


_NHR: Final[dict[str, Formula]] = {
    "all_reduce": nhr_two_way,
    "all_gather": nhr_one_way,
    "reduce_scatter": nhr_one_way,
    "broadcast": nhr_two_way,
}
FORMULAS: Final[dict[str, dict[str, Formula]]] = {
    "mesh": {
        "all_reduce": mesh_two_way,
        "all_gather": mesh_one_way,
        "reduce_scatter": mesh_one_way,
        "all_to_all": mesh_one_way,
        "broadcast": mesh_two_way,
    },
    "switch mesh": {
        "all_reduce": switch_mesh_two_way,
        "all_gather": switch_mesh_one_way,
        "reduce_scatter": switch_mesh_one_way,
        "all_to_all": switch_mesh_one_way,
        "broadcast": switch_mesh_two_way,
    },
    "ring": {
        "all_reduce": ring_all_reduce,
        "all_gather": ring_one_way,
        "reduce_scatter": ring_one_way,
        "broadcast": ring_broadcast,
    },
    "NHR": _NHR,
    "NHR_V1": _NHR,
    "NB": _NHR,
    "H-D_R": {
        "all_reduce": rhd_all_reduce,
        "all_gather": rhd_one_way,
        "reduce_scatter": rhd_one_way,
        "broadcast": rhd_broadcast,
    },
    "pairwise": {"all_to_all": pairwise_all_to_all},
}
"""Algorithm -> kind -> formula, for the algorithms that run on one tier; pipeline and AHC span two."""
