"""The search from the command line: ask, answer, write the folder, tell."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.answer import Answer, answer
from planner.answer_json import answer_object
from planner.bounds import parse_bounds
from planner.question import ask
from planner.run_folder import check_folder, default_folder, write_run

if TYPE_CHECKING:
    from collections.abc import Callable

# A bar that flashes by says less than none.
_BAR_AFTER_S = 2.0


def run_search(options: dict[str, Any]) -> None:
    """Run the search that the options describe; exits with 1 where nothing fits."""
    question = ask(
        model=options["model"],
        npus=options["npus"],
        cluster=options["cluster"],
        seq_len=options["seq_len"],
        global_batch=options["global_batch"],
        precision=options["precision"],
        optimizer=options["optimizer"],
        calibration=options["calibration"],
        comm_algorithm=options["comm_algorithm"],
        bounds=parse_bounds(options["fix"], options["most"]),
        hbm_margin=options["hbm_margin"],
        tokens=options["tokens"],
        top=options["top"],
    )
    folder = Path(options["out"]) if options["out"] else None
    check_folder(folder or Path("titan_runs"))
    if options["quiet"] or options["as_json"]:
        found = answer(question)
    else:
        found = _with_progress(lambda progress: answer(question, progress), options["color"])
    if options["verify"]:
        found = _verified(found, options["verify"], quiet=options["quiet"] or options["as_json"])
    files = write_run(found, folder or default_folder(found))
    if not options["as_json"]:
        from planner.cli.answer_text import print_answer

        print_answer(found, files, color=options["color"])
    # With --json the one object is printed when all is done; a refused launch then prints its error instead.
    holds = found.plans and not (found.verified and all(one.problem for one in found.verified))
    launched = _launch(files, options) if options["launch"] and holds else {}
    if options["as_json"]:
        click.echo(json.dumps({**answer_object(found, files), **launched}, allow_nan=False))
    if not holds:
        raise click.exceptions.Exit(1)


def _verified(found: Answer, count: int, *, quiet: bool) -> Answer:
    from planner.verify import verify

    def said(number: int, plan: str) -> None:
        if not quiet and sys.stderr.isatty():
            click.echo(f"running plan {number} dry: {plan}", err=True)

    return verify(found, count, said)


def _launch(files: dict[str, str], options: dict[str, Any]) -> dict[str, object]:
    from planner.cli.launch import launch_plan

    sys.stdout.flush()  # the plan is to be read while the run goes on
    told = launch_plan(files["folder"], files["config"], as_json=options["as_json"], quiet=options["quiet"])
    return {"launch": told}


def _with_progress(search: Callable[[Callable[[int, int], None]], Answer], color: str) -> Answer:
    """A bar on stderr for searches that take their time, where somebody looks."""
    import time

    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from planner.cli.console import console

    started, terminal = time.monotonic(), console(color, stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} layouts"),
        TimeRemainingColumn(),
        console=terminal,
        transient=True,
        auto_refresh=False,
        disable=not terminal.is_terminal,
    ) as bar:
        task = bar.add_task("searching", total=1, visible=False)

        def show(done: int, layouts: int) -> None:
            bar.update(
                task,
                completed=done,
                total=max(layouts, 1),
                visible=time.monotonic() - started > _BAR_AFTER_S,
                refresh=True,
            )

        return search(show)
