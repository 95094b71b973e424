"""`titan-plan dry-run PLAN`: a step of the real trainer without hardware, beside what was predicted for it."""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from planner.dry_compare import DryComparison
    from planner.dry_setting import DrySetting
    from runtime.config_values import TrainConfig
    from runtime.dry_run.shortened import ToldRun


@click.command("dry-run")
@click.argument("plan")
@click.option(
    "--rank", type=int, help="Rank to run.  [default: the first of the stage with the highest predicted peak]"
)
@click.option("--all-stages", is_flag=True, help="The first rank of every pipeline stage, one after the other.")
@click.option(
    "--trace", metavar="FILE", help="Write memory over the step, for chrome://tracing and MindStudio Insight."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else there.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no notes.")
def dry_run(plan: str, rank: int | None, all_stages: bool, trace: str | None, as_json: bool, quiet: bool) -> None:
    """Run one step of a plan without hardware, beside its prediction: memory, FLOPs, messages of a rank.

    Exits with 1 where the rank does not fit its device, or where prediction and trainer contradict each other.

    \b
    titan-plan dry-run titan_runs/1130-llama2-70b-64
    titan-plan dry-run config.yaml --rank 12 --trace trace_view.json
    titan-plan dry-run config.yaml --all-stages --json
    """
    if rank is not None and all_stages:
        raise click.UsageError("--rank names one rank, --all-stages runs the first of each stage: give one of them")
    config, setting = _read(Path(plan))
    ranks = _ranks(config, setting, rank, all_stages=all_stages)
    if trace is not None:
        _check_place(Path(trace), Path(plan))
    if not quiet:
        for note in setting.notes:
            click.echo(f"note: {note}", err=True)
    runs = _run(config, ranks, quiet=quiet)
    if trace is not None:
        from runtime.dry_run.trace import write_trace

        write_trace([told.run for told in runs], Path(trace))
    _tell(config, setting, runs, all_stages=all_stages, as_json=as_json, chosen=rank is not None, trace=trace)


def _read(plan: Path) -> tuple[TrainConfig, DrySetting]:
    from planner.dry_setting import check_version, setting_of
    from runtime.config import load_config
    from runtime.guard import check_layout
    from runtime.launch import config_file

    config = load_config(config_file(plan))
    check_version(config)
    check_layout(config)
    setting = setting_of(config)
    if config.numerics.compile:
        # The compiler would need the device; it changes neither layout nor messages.
        config = replace(config, numerics=replace(config.numerics, compile=False))
        setting = replace(setting, notes=(*setting.notes, "compile is left out: layers run as they are written"))
    return config, setting


def _ranks(config: TrainConfig, setting: DrySetting, rank: int | None, *, all_stages: bool) -> tuple[int, ...]:
    from cost_models.errors import TitanPlanError
    from planner.dry_setting import first_ranks, worst_rank

    if all_stages:
        return first_ranks(config.layout)
    if rank is None:
        return (worst_rank(setting.setting, config.layout),)
    if not 0 <= rank < config.world_size:
        message = f"--rank {rank} is not one of the {config.world_size} ranks of {config.layout.name}"
        raise TitanPlanError("C610", message, f"0 to {config.world_size - 1}")
    return (rank,)


def _check_place(trace: Path, plan: Path) -> None:
    """A path that cannot be written, or must not be, is told before the run: writing replaces what is there."""
    from cost_models.errors import TitanPlanError
    from runtime.launch import config_file

    try:
        target = trace.resolve()
        taken = target.exists() and not target.is_file()
        if not taken and target != config_file(plan).resolve():
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
                return
    except (OSError, ValueError):
        pass
    raise TitanPlanError(
        "C603", f"cannot write --trace {str(trace)[:80]}", "name a file of its own in a folder of yours"
    )


def _run(config: TrainConfig, ranks: Sequence[int], *, quiet: bool) -> list[ToldRun]:
    found = []
    for number, rank in enumerate(ranks, start=1):
        of_all = f" ({number} of {len(ranks)})" if len(ranks) > 1 else ""
        with _said(f"running a step of rank {rank} of {config.world_size}{of_all}", quiet=quiet):
            found.append(_run_one(config, rank))
    return found


def _run_one(config: TrainConfig, rank: int) -> ToldRun:
    from planner.quiet_torch import quiet_torch

    with quiet_torch():
        from runtime.dry_run.shortened import shortened_dry_run

        return shortened_dry_run(config, rank)


@contextmanager
def _said(what: str, *, quiet: bool) -> Iterator[None]:
    """A line that lives while a run does, where somebody looks; otherwise a plain one on stderr."""
    from planner.cli.console import console

    terminal = console(stderr=True)
    if quiet:
        yield
    elif terminal.is_terminal:
        with terminal.status(f"{what} ..."):
            yield
    else:
        click.echo(f"{what} ...", err=True)
        yield


def _tell(
    config: TrainConfig,
    setting: DrySetting,
    runs: Sequence[ToldRun],
    *,
    all_stages: bool,
    as_json: bool,
    chosen: bool,
    trace: str | None,
) -> None:
    from planner.answer_json import SCHEMA
    from planner.dry_compare import compare, comparison_object

    compared: list[DryComparison] = [
        compare(setting.setting, config.layout, told, known=setting.known) for told in runs
    ]
    if as_json:
        objects = [comparison_object(one) for one in compared]
        click.echo(json.dumps({"schema": SCHEMA, "ranks": objects} if all_stages else objects[0], allow_nan=False))
    else:
        from planner.cli.dry_run_text import print_comparisons

        print_comparisons(config, compared, chosen=chosen)
        if trace is not None:
            click.echo(f"\nsaved  {trace}")
    if any(one.problems() for one in compared):
        raise click.exceptions.Exit(1)
