"""`titan-plan evaluate RUNS.csv -o OUT.csv`: predictions for given layouts, row by row."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("runs")
@click.option("-o", "--out", required=True, help="CSV to write: the input's columns, then the predictions.")
@click.option("--calibration", help="YAML of fitted constants.  [default: shipped for each device]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No summary.")
def evaluate(runs: str, out: str, calibration: str | None, as_json: bool, quiet: bool) -> None:
    """Predict given layouts from a CSV of runs."""
    from cost_models.calibration import load_calibration
    from planner.evaluate import evaluate_runs, write_evaluation

    constants = load_calibration(Path(calibration)) if calibration else None
    table = evaluate_runs(Path(runs), calibration=constants)
    write_evaluation(table, Path(out), Path(runs))
    counts = {status: count for status, count in table.counts().items() if count}
    if as_json:
        click.echo(json.dumps({"schema": 1, "rows": len(table.evaluations), "status": counts, "files": {"out": out}}))
    elif not quiet:
        told = ", ".join(f"{count:,} {status}" for status, count in counts.items())
        click.echo(f"{len(table.evaluations):,} rows: {told or 'none'}; written to {out}", err=True)
