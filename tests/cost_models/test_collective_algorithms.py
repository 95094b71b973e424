"""The closed forms of collectives, against numbers by hand and against the algorithms played step by step.

A step is a list of messages (source, destination, pieces). It takes the alpha of its slowest link plus the bytes on the
fullest link times beta. The player keeps whose contributions each rank holds of each piece, so that a schedule which
does not deliver the collective is noticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import networkx as nx
import pytest

from cost_models.cluster_files import load_shipped_cluster
from cost_models.collective_algorithms import FORMULAS, Cost, ahc_all_reduce, pipeline_one_way
from cost_models.collectives import collective_lines, collective_time_s
from cost_models.topology import build_graph, group_span

Message = tuple[int, int, frozenset[int]]
Link = tuple[str, float, float]
"""Name, alpha in s, beta in s per byte."""
Wiring = Callable[[int, int], tuple[Link, ...]]
"""The links that a message from one rank to another occupies."""
Held = dict[tuple[int, int], frozenset[int]]
"""(rank, piece) -> the ranks whose contributions it holds."""


@dataclass
class Player:
    wiring: Wiring
    piece_bytes: float
    held: Held
    time_s: float = 0.0
    link_bytes: dict[str, float] = field(default_factory=dict)

    def step(self, messages: list[Message]) -> None:
        load: dict[Link, float] = {}
        before = dict(self.held)
        for source, destination, pieces in messages:
            for link in self.wiring(source, destination):
                load[link] = load.get(link, 0.0) + len(pieces) * self.piece_bytes
            for piece in pieces:
                had = self.held.get((destination, piece), frozenset())
                self.held[destination, piece] = had | before[source, piece]
        for link, n_bytes in load.items():
            self.link_bytes[link[0]] = self.link_bytes.get(link[0], 0.0) + n_bytes
        self.time_s += max(link[1] for link in load)
        self.time_s += max(n_bytes * link[2] for link, n_bytes in load.items())


def one_contribution_each(ranks: range) -> Held:
    return {(rank, piece): frozenset([rank]) for rank in ranks for piece in range(len(ranks))}


def mesh_wiring(alpha: float, beta: float) -> Wiring:
    return lambda a, b: ((f"{a}>{b}", alpha, beta),)


def port_wiring(alpha: float, beta: float) -> Wiring:
    return lambda a, b: ((f"{a}>", alpha, beta), (f">{b}", alpha, beta))


def ring_reduce_scatter(player: Player, p: int) -> None:
    for step in range(p - 1):
        player.step([(r, (r + 1) % p, frozenset([(r - step) % p])) for r in range(p)])


def ring_all_gather(player: Player, p: int) -> None:
    """After the reduce-scatter above rank r owns piece r + 1."""
    for step in range(p - 1):
        player.step([(r, (r + 1) % p, frozenset([(r + 1 - step) % p])) for r in range(p)])


def mesh_reduce_scatter(player: Player, p: int) -> None:
    player.step([(a, b, frozenset([b])) for a in range(p) for b in range(p) if a != b])


def mesh_all_gather(player: Player, p: int) -> None:
    player.step([(a, b, frozenset([a])) for a in range(p) for b in range(p) if a != b])


def halving(player: Player, p: int) -> None:
    """Rank r ends with piece r; p = 2^k."""
    distance = p // 2
    while distance:
        messages = []
        for rank in range(p):
            partner = rank ^ distance
            half = frozenset(piece for piece in range(p) if piece // distance == partner // distance)
            messages.append((rank, partner, half))
        player.step(messages)
        distance //= 2


def doubling(player: Player, p: int) -> None:
    """Rank r starts with piece r; p = 2^k."""
    distance = 1
    while distance < p:
        messages = []
        for rank in range(p):
            mine = frozenset(piece for piece in range(p) if piece // distance == rank // distance)
            messages.append((rank, rank ^ distance, mine))
        player.step(messages)
        distance *= 2


def logarithmic_all_gather(player: Player, p: int) -> None:
    """The NB/Bruck exchange for any p: rank r starts with piece r and holds r .. r + have - 1 after each step."""
    have = 1
    while have < p:
        send = min(have, p - have)
        player.step([(r, (r - have) % p, frozenset((r + i) % p for i in range(send))) for r in range(p)])
        have += send


def pairwise(player: Player, p: int) -> None:
    """All-to-all; piece a * p + b is what a has for b."""
    for step in range(1, p):
        player.step([(r, (r + step) % p, frozenset([r * p + (r + step) % p])) for r in range(p)])


def fresh(p: int, wiring: Wiring, n_bytes: float) -> Player:
    return Player(wiring, n_bytes / p, one_contribution_each(range(p)))


def time_of(cost: Cost, n_bytes: float) -> float:
    return cost.alpha_s + n_bytes * cost.seconds_per_byte


ALPHA, BETA, BYTES = 3e-6, 1e-9, 840_000.0


@pytest.mark.parametrize("p", range(2, 10))
def test_a_ring_played_takes_what_the_formula_says(p: int) -> None:
    player = fresh(p, mesh_wiring(ALPHA, BETA), BYTES)
    ring_reduce_scatter(player, p)
    assert player.time_s == pytest.approx(time_of(FORMULAS["ring"]["reduce_scatter"](p, ALPHA, BETA), BYTES))
    everyone = frozenset(range(p))
    assert all(player.held[rank, (rank + 1) % p] == everyone for rank in range(p))
    ring_all_gather(player, p)
    assert set(player.held.values()) == {everyone}
    assert player.time_s == pytest.approx(time_of(FORMULAS["ring"]["all_reduce"](p, ALPHA, BETA), BYTES))


@pytest.mark.parametrize("p", range(2, 10))
def test_a_mesh_played_takes_what_the_formula_says_whatever_its_size(p: int) -> None:
    player = fresh(p, mesh_wiring(ALPHA, BETA), BYTES)
    mesh_reduce_scatter(player, p)
    assert player.time_s == pytest.approx(time_of(FORMULAS["mesh"]["reduce_scatter"](p, ALPHA, BETA), BYTES))
    mesh_all_gather(player, p)
    assert set(player.held.values()) == {frozenset(range(p))}
    assert player.time_s == pytest.approx(time_of(FORMULAS["mesh"]["all_reduce"](p, ALPHA, BETA), BYTES))


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_halving_and_doubling_played_take_what_the_formula_says(p: int) -> None:
    player = fresh(p, port_wiring(ALPHA, BETA), BYTES)
    halving(player, p)
    assert player.time_s == pytest.approx(time_of(FORMULAS["H-D_R"]["reduce_scatter"](p, ALPHA, BETA), BYTES))
    doubling(player, p)
    assert set(player.held.values()) == {frozenset(range(p))}
    assert player.time_s == pytest.approx(time_of(FORMULAS["H-D_R"]["all_reduce"](p, ALPHA, BETA), BYTES))


@pytest.mark.parametrize("p", range(2, 18))
def test_a_logarithmic_all_gather_played_takes_what_nhr_and_nb_say(p: int) -> None:
    player = fresh(p, port_wiring(ALPHA, BETA), BYTES)
    player.held = {(rank, rank): frozenset([rank]) for rank in range(p)}
    logarithmic_all_gather(player, p)
    assert player.held == {(rank, piece): frozenset([piece]) for rank in range(p) for piece in range(p)}
    for name in ("NHR", "NB"):
        assert player.time_s == pytest.approx(time_of(FORMULAS[name]["all_gather"](p, ALPHA, BETA), BYTES))


@pytest.mark.parametrize("p", range(2, 10))
def test_a_pairwise_all_to_all_played_takes_what_the_formula_says(p: int) -> None:
    held = {(a, a * p + b): frozenset([a]) for a in range(p) for b in range(p)}
    player = Player(port_wiring(ALPHA, BETA), BYTES / p, held)
    pairwise(player, p)
    assert all(player.held[b, a * p + b] == frozenset([a]) for a in range(p) for b in range(p))
    assert player.time_s == pytest.approx(time_of(FORMULAS["pairwise"]["all_to_all"](p, ALPHA, BETA), BYTES))


@pytest.mark.parametrize(
    ("algorithm", "kind", "p", "seconds"),
    [
        # alpha 1 s, beta 1 s/byte, n = p bytes, worked out from the table of the HCCL guide (ascend.md 3.2).
        ("mesh", "reduce_scatter", 8, 1 + 1),
        ("mesh", "all_reduce", 8, 2 + 2),
        ("mesh", "broadcast", 8, 2 + 2),
        ("ring", "all_gather", 8, 7 + 7),
        ("ring", "all_reduce", 8, 14 + 14),
        ("ring", "broadcast", 8, 7 * (1 + 8)),
        ("NHR", "all_gather", 6, 3 + 5),
        ("NHR", "all_reduce", 8, 6 + 14),
        ("NB", "broadcast", 6, 6 + 10),
        ("NHR_V1", "reduce_scatter", 5, 3 + 4),
        ("H-D_R", "reduce_scatter", 8, 3 + 7),
        # p = 6: F = 2, q = 4, S = 3 + 2: (1 + 6) + (2 + 5) + (1 + 1)
        ("H-D_R", "reduce_scatter", 6, 16),
        ("H-D_R", "all_reduce", 6, 6 + (2 * 3 / 4 + 2) * 6),
        # p = 3: F = 1, q = 2, S = 2: (1 + 3) + (1 + 2) + (1 + 1)
        ("H-D_R", "all_gather", 3, 9),
        ("H-D_R", "broadcast", 6, 3 * (1 + 6)),
        ("pairwise", "all_to_all", 8, 7 + 7),
    ],
)
def test_formulas_give_the_numbers_of_the_table(algorithm: str, kind: str, p: int, seconds: float) -> None:
    assert time_of(FORMULAS[algorithm][kind](p, 1.0, 1.0), p) == pytest.approx(seconds)


def test_the_pipeline_formula_by_hand() -> None:
    """s = 8, p = 8, P = 4, inter (5, 2), intra (1, 1): max(1*2 + 5, 1*1 + 1) * 3 + 1*1 + 1 = 23."""
    cost = pipeline_one_way(4, Cost(5.0, 2 / 8), Cost(1.0, 1 / 8))
    assert time_of(cost, 8.0) == pytest.approx(23.0)


def test_the_ahc_formula_by_hand() -> None:
    """m = 4, d = 0, G = 4, a = 1, b = 1, C = 2, n = 16: 2 (2 + 2) + 2 (3/4 + 3 * 2 / 16) 16 = 44."""
    assert time_of(ahc_all_reduce(4, 4, Cost(1.0, 1.0), Cost(1.0, 2.0)), 16.0) == pytest.approx(44.0)


def graph_wiring(graph: nx.Graph, alphas: dict[str, float]) -> Wiring:
    """Send over the direct link where there is one, else over the switch that both devices are on."""

    def links(a: int, b: int) -> tuple[Link, ...]:
        path = nx.shortest_path(graph, f"d{a}", f"d{b}")
        hops = []
        for start, end in itertools.pairwise(path):
            edge = graph.edges[start, end]
            hops.append((f"{start}>{end}", alphas[edge["tier"]], 1 / edge["reachable_bytes_per_s"]))
        return tuple(hops)

    return links


@pytest.mark.parametrize("members", [2, 4, 8])
@pytest.mark.parametrize("servers", [2, 3, 4])
def test_a_hierarchical_all_reduce_played_on_the_graph_takes_what_its_line_says(members: int, servers: int) -> None:
    """Reduce-scatter on the mesh, rings between servers on each share, all-gather on the mesh; 64 MiB on 910B."""
    cluster = load_shipped_cluster("atlas-800t-a2")
    n_bytes, step = 64 * 2**20, members * servers
    alphas = {tier.name: tier.step_latency_s for tier in cluster.tiers}
    wiring = graph_wiring(build_graph(cluster, 8 * servers), alphas)
    ranks = [8 * server + member for server in range(servers) for member in range(members)]
    player = Player(wiring, n_bytes / step, {(r, piece): frozenset([r]) for r in ranks for piece in range(step)})
    share = {member: [member * servers + i for i in range(servers)] for member in range(members)}

    def on_the_mesh(piece_of: Callable[[int, int], int]) -> None:
        player.step(
            [
                (8 * server + a, 8 * server + b, frozenset(share[piece_of(a, b)]))
                for server in range(servers)
                for a in range(members)
                for b in range(members)
                if a != b
            ]
        )

    def one_ring_step(offset: int, turn: int) -> None:
        player.step(
            [
                (8 * s + m, 8 * ((s + 1) % servers) + m, frozenset([share[m][(s + offset - turn) % servers]]))
                for s in range(servers)
                for m in range(members)
            ]
        )

    on_the_mesh(lambda _, b: b)
    for offset in (0, 1):
        for turn in range(servers - 1):
            one_ring_step(offset, turn)
    on_the_mesh(lambda a, _: a)
    assert {player.held[r, piece] for r in ranks for piece in range(step)} == {frozenset(ranks)}
    span = group_span(cluster, ((members, 1), (servers, 8)))
    lines = collective_lines("all_reduce", span, cluster, "ring")
    assert [line.algorithm for line in lines] == ["mesh + ring"]
    assert collective_time_s(lines, float(n_bytes)) == pytest.approx(player.time_s)
