"""`titan-plan evaluate RUNS.csv -o OUT.csv`: predictions for given layouts, row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

# Option -> the column whose empty cells it fills.
_FILLS = {
    "model": "model",
    "cluster": "device",
    "seq_len": "seq",
    "global_batch": "global_batch",
    "npus": "n_devices",
    "precision": "precision",
    "stack": "stack",
}
_COUNT = click.IntRange(1, 10**8)


@click.command()
@click.argument("runs")
@click.option("-o", "--out", required=True, help="CSV to write: the input's columns, then the predictions.")
@click.option("--model", help="For rows without one (`model`): a name or a file, as the search takes it.")
@click.option("--cluster", help="For rows that name none (`device`, `hardware`): a name or YAML.")
@click.option("--seq-len", type=_COUNT, help="Tokens of a sequence, for rows without (`seq`).")
@click.option("--global-batch", type=_COUNT, help="Sequences of a step, for rows without (`global_batch`).")
@click.option("--npus", type=click.IntRange(1, 100_000), help="Devices, for rows without (`n_devices`).")
@click.option("--precision", help="bf16, fp16, fp32 or fp8, for rows without (`precision`).")
@click.option("--stack", help="Training program, for rows without (`stack`): titan is the one that plans are for.")
@click.option("--calibration", help="YAML of fitted constants.  [default: shipped for each device]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No summary, no notes.")
def evaluate(
    runs: str, out: str, calibration: str | None, as_json: bool, quiet: bool, **given: str | int | None
) -> None:
    """Predict given layouts from a CSV of runs.

    \b
    titan-plan evaluate runs.csv -o predicted.csv
    titan-plan evaluate plans.csv -o predicted.csv --model 70B --cluster atlas-800t-a2 --seq-len 4096 --stack titan
    """
    from cost_models.calibration import load_calibration
    from planner.accuracy_cases import cases_of
    from planner.accuracy_statistics import errors_of
    from planner.evaluate import evaluate_runs, write_evaluation

    _check(given)
    constants = load_calibration(Path(calibration)) if calibration else None
    defaults = {_FILLS[name]: str(value) for name, value in given.items() if value is not None}
    evaluated = evaluate_runs(Path(runs), calibration=constants, defaults=defaults)
    write_evaluation(evaluated, Path(out), Path(runs))
    counts = {status: count for status, count in evaluated.counts().items() if count}
    ignored = evaluated.table.ignored
    errors = errors_of([case.time_s for case in cases_of(evaluated.comparable()) if case.time_s])
    if as_json:
        answer = {"schema": 1, "rows": len(evaluated.evaluations), "status": counts, "ignored": ignored}
        answer |= {"compared": errors.rows, "median_error": errors.median, "files": {"out": out}}
        click.echo(json.dumps(answer))
    elif not quiet:
        told = ", ".join(f"{count:,} {status}" for status, count in counts.items())
        click.echo(f"{len(evaluated.evaluations):,} rows: {told or 'none'}; written to {out}", err=True)
        if errors.median is not None:
            click.echo(f"step time: median absolute error {errors.median:.1%} over {errors.rows:,} rows", err=True)
        if ignored:
            click.echo(f"note: not read: {', '.join(ignored)}", err=True)


def _check(given: dict[str, Any]) -> None:
    """Refuse a wrong name once, not row by row."""
    from cost_models.catalog import find_cluster, find_model
    from cost_models.stack import find_stack
    from cost_models.workload import Workload

    if given["model"] is not None:
        find_model(given["model"])
    if given["cluster"] is not None:
        find_cluster(given["cluster"])
    if given["stack"] is not None:
        find_stack(given["stack"])
    if given["precision"] is not None:
        Workload(seq_len=1, global_batch=1, precision=given["precision"])
