"""The closed forms against the simulator, rank by rank and schedule by schedule, and against what the papers claim."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cost_models.pipeline import ByRank, bubble_s, p2p_messages, step_span_s, step_span_unequal_s
from cost_models.pipeline_simulator import simulate
from cost_models.schedules import SCHEDULES, schedule_actions, schedule_code, stage_rank
from tests.cost_models.schedule_shapes import SHAPES


class Case(NamedTuple):
    name: str
    pp: int
    vpp: int
    micro_batches: int
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    p2p_s: float

    @property
    def columns(self) -> list[np.ndarray]:
        return [np.array([value]) for value in (schedule_code(self.name), *self[1:])]

    @property
    def simulated_s(self) -> float:
        stages = self.pp * self.vpp
        times = ([seconds / self.vpp] * stages for seconds in self[4:7])
        return simulate(schedule_actions(*self[:4]), *times, self.p2p_s).step_time_s

    @property
    def span_s(self) -> float:
        return float(step_span_s(*self.columns).item())


POSITIVE_S = st.floats(0.05, 20.0)


def exact_p2p_limit_s(name: str, chunk_s: tuple[float, float, float]) -> float:
    """The largest p2p time for which `step_span_s` claims to be exact."""
    f, i, w = chunk_s
    limits = {"interleaved": min(f, i + w), "zero-bubble": w / 2, "zb-v": min(chunk_s)}
    return limits.get(name, 50.0)


def claims_exact(name: str, pp: int, vpp: int, micro_batches: int) -> bool:
    if name == "zero-bubble":
        return micro_batches >= pp or vpp == 1
    return name != "zb-v" or micro_batches >= 2 * pp - 1


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    shape = draw(st.sampled_from(SHAPES[name]))
    times = tuple(draw(POSITIVE_S) for _ in range(3))
    limit = exact_p2p_limit_s(name, tuple(seconds / shape[1] for seconds in times))
    return Case(name, *shape, *times, p2p_s=draw(st.sampled_from((0.0, 0.3, 1.0))) * limit)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_span_is_the_simulated_step_wherever_it_claims_so(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name))
    assume(claims_exact(*case[:4]))
    assert case.span_s == pytest.approx(case.simulated_s, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "vpp", "rounds"), [("zero-bubble", 1, (1, 2)), ("zero-bubble", 2, (1, 2)), ("zb-v", 2, (2, 3))]
)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_every_path_of_the_split_schedules_is_met(name: str, pp: int, vpp: int, rounds: tuple[int, int]) -> None:
    """Which path is longest turns on the ratios of four times, so they are drawn widely."""
    random = np.random.default_rng(5)
    for _ in range(700):
        times = 10.0 ** random.uniform(-0.7, 0.7, 3)
        p2p_s = exact_p2p_limit_s(name, tuple(times / vpp)) * random.uniform()
        case = Case(name, pp, vpp, pp * random.choice(rounds), *times, p2p_s)
        assert case.span_s == pytest.approx(case.simulated_s, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 6), st.data(), POSITIVE_S, POSITIVE_S, POSITIVE_S)
def test_zb_v_with_few_micro_batches_is_exact_without_p2p(
    pp: int, data: st.DataObject, forward_s: float, input_grad_s: float, weight_grad_s: float
) -> None:
    case = Case("zb-v", pp, 2, data.draw(st.integers(1, pp)), forward_s, input_grad_s, weight_grad_s, 0.0)
    assert case.span_s == pytest.approx(case.simulated_s, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("interleaved", 0.94, 1.1), ("zero-bubble", 0.92, 1.16), ("zb-v", 0.99, 1.2)]
)
def test_span_outside_its_exact_region_stays_near(name: str, low: float, high: float) -> None:
    """Any micro batches, times within a factor of four, p2p up to the smallest of them."""
    random = np.random.default_rng(7)
    ratios = []
    for shape in SHAPES[name]:
        for _ in range(3):
            times = random.uniform(0.5, 2.0, 3)
            p2p_s = random.choice([0.0, 0.5, 1.0]) * min(times) / shape[1]
            case = Case(name, *shape, *times, p2p_s)
            ratios.append(case.span_s / case.simulated_s)
    assert low < min(ratios)
    assert max(ratios) < high


def test_columns_of_mixed_schedules_are_the_rows_one_by_one() -> None:
    rows = [Case(name, *SHAPES[name][-1], 1.0, 0.8, 1.2, 0.05) for name in SCHEDULES]
    columns = [np.concatenate(column) for column in zip(*(row.columns for row in rows), strict=True)]
    assert step_span_s(*columns).tolist() == [row.span_s for row in rows]
    assert bubble_s(*columns) == pytest.approx([row.span_s - row.micro_batches * 3.0 for row in rows])


@pytest.mark.parametrize("vpp", [1, 2, 4])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_bubble_fraction_of_narayanan(pp: int, vpp: int) -> None:
    """Narayanan et al. 2021, sections 2.2.1 and 2.2.2: (p - 1) / m, interleaved (p - 1) / (v m)."""
    micro_batches = 4 * pp
    case = Case("interleaved" if vpp > 1 else "1f1b", pp, vpp, micro_batches, 1.0, 1.0, 1.0, 0.0)
    ideal_s = 3.0 * micro_batches
    assert bubble_s(*case.columns) / ideal_s == pytest.approx((pp - 1) / (vpp * micro_batches))
    assert case.simulated_s == pytest.approx(ideal_s * (1 + (pp - 1) / (vpp * micro_batches)))


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.9), (2.0, 2.1, 0.5)])
def test_bubble_of_zb_h1(times: tuple[float, float, float]) -> None:
    """Qi et al. 2023, table 2: (p - 1)(TF + TB - TW), where W is the smallest."""
    case = Case("zero-bubble", 4, 1, 12, *times, 0.0)
    assert bubble_s(*case.columns) == pytest.approx(3 * (times[0] + times[1] - times[2]))


@pytest.mark.parametrize("pp", [2, 3, 4, 6])
def test_zb_v_has_no_bubble_inside_a_rank_when_all_times_are_equal(pp: int) -> None:
    """Qi et al. 2023, section 6. Their bubble runs from a rank's own start, so the first pp - 1 chunks are apart."""
    stages = [1.0] * (2 * pp)
    result = simulate(schedule_actions("zb-v", pp, 2, 3 * pp), stages, stages, stages)
    for rank, own in enumerate(result.timeline):
        assert own[0].start_s == rank
        assert own[-1].end_s - own[0].start_s == result.busy_s[rank]
    case = Case("zb-v", pp, 2, 3 * pp, 2.0, 2.0, 2.0, 0.0)
    assert bubble_s(*case.columns) == pytest.approx(pp - 1)


@pytest.mark.parametrize("name", SCHEDULES[1:])
def test_the_share_of_the_bubble_falls_with_micro_batches(name: str) -> None:
    vpp = {"interleaved": 2, "zb-v": 2}.get(name, 1)
    shares = []
    for micro_batches in (8, 16, 32, 64):
        case = Case(name, 4, vpp, micro_batches, 1.0, 1.1, 0.9, 0.0)
        shares.append(float(bubble_s(*case.columns).item()) / case.span_s)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < shares[0] / 4


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCHEDULES), st.data())
def test_alike_ranks_give_the_span_of_alike_ranks(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name))
    code, pp, vpp, micro_batches, *times, p2p_s = case.columns
    by_rank = [ByRank(seconds, seconds, seconds) for seconds in times]
    assert step_span_unequal_s(code, pp, vpp, micro_batches, *by_rank, p2p_s) == pytest.approx(case.span_s)


@pytest.mark.parametrize("name", SCHEDULES[1:])
def test_unequal_stages_are_never_underestimated_and_at_most_a_fifth_over(name: str) -> None:
    """First and last rank 0.7 to 1.5 times the others, two rounds of micro batches or more."""
    random = np.random.default_rng(11)
    ratios = []
    for shape in (shape for shape in SHAPES[name] if shape[2] >= 2 * shape[0]):
        pp, vpp, _ = shape
        scale = np.ones(pp)
        scale[[0, -1]] = random.uniform(0.7, 1.5, 2)
        base = random.uniform(0.5, 1.5, 3)
        p2p_s = random.choice([0.0, 0.1]) * min(base) / vpp
        of_stage = [scale[stage_rank(name, pp, stage)] / vpp for stage in range(pp * vpp)]
        step_s = simulate(
            schedule_actions(name, *shape), *([seconds * share for share in of_stage] for seconds in base), p2p_s
        ).step_time_s
        by_rank = [ByRank(*(np.array([seconds * scale[rank]]) for rank in (0, pp // 2, -1))) for seconds in base]
        columns = Case(name, *shape, *base, p2p_s).columns
        span_s = step_span_unequal_s(*columns[:4], *by_rank, columns[-1]).item()
        ratios.append(span_s / step_s)
    assert min(ratios) > 0.995
    assert max(ratios) < (1.0 + 1e-9 if name == "gpipe" else 1.2)
    assert np.mean(ratios) < 1.04


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_are_the_crossings_of_the_action_lists(name: str) -> None:
    for pp, vpp, micro_batches in SHAPES[name][::7]:
        counts = np.zeros(pp, dtype=np.int64)
        for rank, own in enumerate(schedule_actions(name, pp, vpp, micro_batches)):
            for action in own:
                target = action.stage + {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
                peer = stage_rank(name, pp, target) if 0 <= target < pp * vpp else rank
                if peer != rank:
                    counts[[rank, peer]] += 1
        shape = [np.full(pp, value) for value in (schedule_code(name), pp, vpp, micro_batches)]
        assert p2p_messages(*shape, np.arange(pp)).tolist() == counts.tolist()
