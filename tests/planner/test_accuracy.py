"""The accuracy page and its statistics."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from planner.accuracy import accuracy_page, main
from planner.accuracy_cases import cases_of, sweeps_of
from planner.accuracy_statistics import errors_of, kendall_tau_b, order_of, quantile
from planner.evaluate import evaluate_runs

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "tests" / "data" / "runs.csv"
HEADER = "id,source,model,device,n_devices,tp,pp,dp,micro_batch,global_batch,seq,step_time_s,tokens_per_s_per_device"


def lists() -> list[tuple[list[int], list[int]]]:
    dice = random.Random(7)  # noqa: S311 - a reproducible sample, no secret
    return [([dice.randrange(4) for _ in range(n)], [dice.randrange(4) for _ in range(n)]) for n in range(2, 14)]


@pytest.mark.parametrize(("first", "second"), lists())
def test_tau_b_is_that_of_scipy(first: list[int], second: list[int]) -> None:
    stats = pytest.importorskip("scipy.stats")
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert kendall_tau_b(first, second) is None
    else:
        assert kendall_tau_b(first, second) == pytest.approx(stats.kendalltau(first, second).statistic)


def test_tau_is_one_for_the_same_order_and_minus_one_for_the_opposite() -> None:
    for order in itertools.permutations(range(4)):
        assert kendall_tau_b(order, order) == pytest.approx(1)
        assert kendall_tau_b(order, [-value for value in order]) == pytest.approx(-1)


def test_errors_are_relative_to_what_was_measured() -> None:
    errors = errors_of([(1.1, 1.0), (0.5, 1.0), (2.0, 2.0)])
    assert (errors.rows, errors.median, errors.bias) == (3, pytest.approx(0.1), 0.0)
    assert errors.p90 == pytest.approx(0.42)
    assert errors_of([]).median is None
    assert quantile([1.0, 2.0], 0.5) == 1.5


def test_regret_is_what_the_picked_layout_lost() -> None:
    order = order_of([(1.0, 12.0), (2.0, 10.0), (3.0, 15.0)])
    assert order.regret == pytest.approx(0.2)
    assert (order.agreeing, order.pairs) == (2, 3)
    assert order_of([(1.0, 12.0), (2.0, 10.0)], fits=[False, True]).regret == 0
    assert order_of([(1.0, 12.0), (2.0, 10.0)], fits=[False, False]).regret == pytest.approx(0.2)


def test_measured_time_comes_from_throughput_where_no_step_time_is_given() -> None:
    rows = ("a,s,llama2-7b,910B,8,8,1,1,1,64,4096,20,", "b,s,llama2-7b,910B,8,8,1,1,1,64,4096,,1638.4")
    first, second = cases_of(evaluate_runs("\n".join([HEADER, *rows])))
    assert first.time_s == second.time_s
    assert first.time_s is not None
    assert first.time_s[1] == 20


def test_repeated_layouts_count_once_in_a_sweep() -> None:
    layouts = [(8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 2, 2), (2, 4, 1)]
    rows = [
        f"{n},s,llama2-7b,910B,8,{tp},{pp},{dp},1,64,4096,{20 + n},"
        for n, (tp, pp, dp) in enumerate([*layouts, layouts[0], layouts[0]])
    ]
    (sweep,) = sweeps_of(cases_of(evaluate_runs("\n".join([HEADER, *rows]))))
    assert [measured for _, measured in sweep.times_s] == [25, 21, 22, 23, 24]
    assert not sweeps_of(cases_of(evaluate_runs("\n".join([HEADER, *rows[:3]]))))


def test_the_page_is_deterministic_and_names_no_machine(tmp_path: Path) -> None:
    out = tmp_path / "accuracy.md"
    assert main(["--measurements", str(SAMPLE), "-o", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    assert page == accuracy_page(cases_of(evaluate_runs(SAMPLE)))
    assert str(tmp_path) not in page
    assert "priors, not fits" in page
    assert "| incomplete | global_batch is empty | 1 |" in page
    assert "| sample |" in page


def test_a_table_that_cannot_be_read_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--measurements", str(tmp_path), "-o", str(tmp_path / "page.md")]) == 2
    assert "error[C603]" in capsys.readouterr().err
    assert main(["--measurements", str(SAMPLE), "-o", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err
