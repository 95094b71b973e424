"""Predicted against measured over a table of published runs, as a Markdown page.

    python -m planner.accuracy --measurements ../shared/measurements/measurements.csv -o docs/accuracy.md

The page names no path and no date: the same table and constants give the same page.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from cost_models.errors import TitanPlanError

from .accuracy_cases import SMALLEST_SWEEP, Case, cases_of, sweeps_of
from .accuracy_statistics import Order, errors_of, order_of
from .evaluate import evaluate_runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WORST = 15
_SMALLEST_FOR_TAU = 5
_TINY_MODELS = frozenset({"megatron-lm-ci-golden"})
_INTRODUCTION = """# Accuracy

Predicted against measured, over {rows} published runs (their sources are in the table of measurements).
Written by `python -m planner.accuracy`; change the cost model, run it again, and the difference is the argument.
Predicted memory against that of our own trainer, which needs no device, is in [accuracy-trainer](accuracy-trainer.md).

**The constants of the cost model are priors, not fits.** They stand for data sheets, papers and the documentation of
libraries (each file in `configs/calibrations/` says which); none was fitted to a row of this table. What is below is
therefore the error of a first plan on a machine that nobody has measured; constants measured on a machine go in with
`--calibration`. What the table did give are the widths of the intervals (`time_sigma`, `memory_sigma`:
how far these priors were off) and a check of how its rows are read: which program a row ran on, and what that
program does where the row says nothing (its default for attention, its cut of experts).

Reading: an error is predicted / measured - 1. `median` and `p90` are of its absolute value, `bias` is the median with
its sign (negative: predicted too low). Step time is the published one, or global batch x sequence / (tokens per
second and device x devices). Memory is the peak of torch's allocator on the worst rank; for bigscience and dlperf what
the device reports, for megatron-lm-ci-golden the last rank's, as they were measured. Rows that are predicted not to
fit keep their step time. What an empty cell of a row is taken for, and which program it is taken to have run on, is
told in `planner/run_table.py`, `run_layout.py` and `run_model.py`.
"""

_RANKING = """## Ranking

A sweep is {smallest} or more layouts of one source, model, sequence, batch, precision and number of devices; repeated
measurements of a layout are taken as their median. `tau` is Kendall's tau-b (1: same order), over the sweeps of
{for_tau} or more; `pairs` the share of pairs put in the right order. `regret` is how much slower the layout with the
best predicted time (of those predicted to fit) was than the best of its sweep.

"""
_FITS = """## Fits or not

Runs that fitted, and runs that went out of memory, and how many of each were called right. Only runs that worked are
published as a rule: the first column is what a memory model that is too cautious fails, the second one that is too
bold. Many of the former hide a setting that their source did not print (recomputation, ZeRO, a fused loss).

"""
_WORST_TITLE = """## The {n} worst step times

Without megatron-lm-ci-golden: its models are tiny and its times those of the host, of use for memory only.

"""


def accuracy_page(cases: Sequence[Case]) -> str:
    """The whole page."""
    sections = (
        _INTRODUCTION.format(rows=len(cases)),
        _errors_section(cases),
        _order_section(cases),
        _sweeps_section(cases),
        _fits_section(cases),
        _worst_section(cases),
        _excluded_section(cases),
    )
    return "\n".join(sections)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; exit code 2 where the table cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m planner.accuracy", description="Predicted against measured.")
    parser.add_argument("--measurements", type=Path, required=True, help="CSV of measured runs")
    parser.add_argument("-o", "--output", type=Path, required=True, help="Markdown file to write")
    given = parser.parse_args(arguments)
    try:
        page = accuracy_page(cases_of(evaluate_runs(given.measurements)))
        given.output.write_text(page, encoding="utf-8")
    except TitanPlanError as error:
        sys.stderr.write(f"{error}\n{error.hint}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"error[C603]: cannot write {given.output}: {error.strerror}\n")
        return 2
    return 0


def _errors_section(cases: Sequence[Case]) -> str:
    groups = [*sorted(_by_source(cases).items()), ("**all**", list(cases))]
    times = [[source, *_error_cells(members, [c.time_s for c in members if c.time_s])] for source, members in groups]
    memory = [
        [source, *_error_cells(members, [c.memory_gib for c in members if c.memory_gib])] for source, members in groups
    ]
    header = ("source", "rows", "compared", "median", "p90", "bias")
    return (
        "## Step time\n\n"
        + _table(header, [row for row in times if row[2] != "0"])
        + "\n## Peak memory\n\n"
        + _table(header, [row for row in memory if row[2] != "0"])
    )


def _error_cells(members: Sequence[Case], pairs: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    errors = errors_of(pairs)
    return (
        str(len(members)),
        str(errors.rows),
        *map(_percent, (errors.median, errors.p90)),
        _percent(errors.bias, signed=True),
    )


def _order_section(cases: Sequence[Case]) -> str:
    by_source: dict[str, list[Order]] = defaultdict(list)
    for sweep in sweeps_of(cases):
        by_source[sweep.source].append(order_of(sweep.times_s, sweep.fits))
    everything = [order for orders in by_source.values() for order in orders]
    rows = [[source, *_order_cells(orders)] for source, orders in sorted(by_source.items())]
    rows.append(["**all**", *_order_cells(everything)])
    header = ("source", "sweeps", "layouts", "mean tau", "pairs", "mean regret", "max regret", "best picked")
    return _RANKING.format(smallest=SMALLEST_SWEEP, for_tau=_SMALLEST_FOR_TAU) + _table(header, rows)


def _sweeps_section(cases: Sequence[Case]) -> str:
    """Each sweep large enough for a rank correlation."""
    ordered = [(sweep, order_of(sweep.times_s, sweep.fits)) for sweep in sweeps_of(cases)]
    rows = [
        [
            sweep.source,
            sweep.label,
            str(order.rows),
            "" if order.tau is None else f"{order.tau:.2f}",
            _percent(order.agreeing / order.pairs if order.pairs else None),
            _percent(order.regret),
        ]
        for sweep, order in ordered
        if order.rows >= _SMALLEST_FOR_TAU
    ]
    header = ("source", "sweep", "layouts", "tau", "pairs", "regret")
    return "### Sweep by sweep\n\n" + _table(header, rows)


def _order_cells(orders: Sequence[Order]) -> tuple[str, ...]:
    taus = [order.tau for order in orders if order.tau is not None and order.rows >= _SMALLEST_FOR_TAU]
    pairs = sum(order.pairs for order in orders)
    regrets = [order.regret for order in orders]
    return (
        str(len(orders)),
        str(sum(order.rows for order in orders)),
        f"{statistics.fmean(taus):.2f}" if taus else "",
        _percent(sum(order.agreeing for order in orders) / pairs if pairs else None),
        _percent(statistics.fmean(regrets) if regrets else None),
        _percent(max(regrets) if regrets else None),
        f"{sum(regret == 0 for regret in regrets)} of {len(regrets)}",
    )


def _fits_section(cases: Sequence[Case]) -> str:
    """Runs that did and did not fit, and how many of them were called right."""
    rows = []
    for source, members in [*sorted(_by_source(cases).items()), ("**all**", list(cases))]:
        called = [(case.outcome, case.evaluation.fits) for case in members if case.evaluation.fits is not None]
        ran, failed = [f for o, f in called if o == "ok"], [f for o, f in called if o == "oom"]
        if called:
            right = f"{sum(not fits for fits in failed)} of {len(failed)}" if failed else ""
            rows.append([source, f"{sum(map(bool, ran))} of {len(ran)}" if ran else "", right])
    return _FITS + _table(("source", "ran, called so", "out of memory, called so"), rows)


def _worst_section(cases: Sequence[Case]) -> str:
    shown = (case for case in cases if case.source not in _TINY_MODELS)
    timed = [(case.time_s[0] / case.time_s[1], case) for case in shown if case.time_s]
    worst = sorted(timed, key=lambda pair: (-max(pair[0], 1 / pair[0]), pair[1].identity))[:_WORST]
    rows = [
        [case.identity, case.source, case.label, f"{case.time_s[0]:.4g}", f"{case.time_s[1]:.4g}", f"{ratio:.2f}"]
        for ratio, case in worst
        if case.time_s
    ]
    header = ("id", "source", "run", "predicted s", "measured s", "ratio")
    return _WORST_TITLE.format(n=len(rows)) + _table(header, rows)


def _excluded_section(cases: Sequence[Case]) -> str:
    """Rows without a comparison, by what they lack."""
    counts = Counter(
        (case.evaluation.status, case.evaluation.cause) for case in cases if not case.evaluation.step_time_s
    )
    unmeasured = sum(bool(case.evaluation.step_time_s) and not (case.time_s or case.memory_gib) for case in cases)
    rows = [
        [status, cause, str(n)] for (status, cause), n in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    ]
    if unmeasured:
        rows.append(["predicted", "neither step time nor memory was published", str(unmeasured)])
    return "## Rows that are not compared\n\n" + _table(("status", "what they lack or break", "rows"), rows)


def _by_source(cases: Iterable[Case]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        found[case.source or "(no source)"].append(case)
    return found


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _percent(share: float | None, *, signed: bool = False) -> str:
    if share is None:
        return ""
    return f"{100 * share:+.1f} %" if signed else f"{100 * share:.1f} %"


if __name__ == "__main__":
    sys.exit(main())
