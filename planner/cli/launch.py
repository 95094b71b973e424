"""`titan-plan launch PLAN`: start a plan here, show what nodes must run, or rehearse it with a tiny model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runtime.device import Devices
    from runtime.launch import Job


@click.command()
@click.argument("plan")
@click.option("--local", is_flag=True, help="Rehearse the same layout here: a tiny model, at most 8 ranks, 10 steps.")
@click.option("--nodes", metavar="HOST1,HOST2,...", help="Show what each node must run; start nothing.")
@click.option("--dry-run", is_flag=True, help="Check everything, show command and variables; start nothing.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="A value in place of the file's.")
@click.option("--max-restarts", type=click.IntRange(0, 1000), default=0, show_default=True, help="After a failure.")
@click.option("--master-port", type=click.IntRange(1, 65535), help="Where ranks meet.  [default: a free one]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, the run's output on stderr.")
@click.option("-q", "--quiet", is_flag=True, help="No notes before the start.")
@click.option("--module", default="runtime.train", show_default=True, help="Python module that each rank runs.")
def launch(**options: Any) -> None:  # noqa: ANN401 - click passes what the options say
    """Start a plan, a run folder or a config.yaml, exactly as it says.

    \b
    titan-plan launch titan_runs/1130-llama2-70b-64 --local
    titan-plan launch config.yaml --set training.lr=1e-4
    titan-plan launch config.yaml --nodes node1,node2
    """
    if options["nodes"]:
        if options["local"]:
            raise click.UsageError("--nodes shows commands for other machines, --local has no use beside it")
        _show_nodes(options)
        return
    job = _job(options)
    if options["dry_run"]:
        _show(job, as_json=options["as_json"])
        return
    found = start(job, as_json=options["as_json"], quiet=options["quiet"])
    if options["as_json"]:
        click.echo(json.dumps({"schema": 1, "launch": found}))


def start(job: Job, *, as_json: bool, quiet: bool) -> dict[str, object]:
    """Run a job and tell what a program wants to know of it; raises what it ended with if not well."""
    from runtime.launch import launch as run

    if not quiet and not as_json:
        click.echo(f"starting {_ranks(job)}; logs in {job.logs}/", err=True)
    ended = run(job, out=sys.stderr if as_json else None)
    if ended.error is not None:
        raise ended.error
    if not quiet and not as_json:
        click.echo(f"done in {ended.seconds:.1f} s; logs in {ended.logs}/", err=True)
    return {**_object(job), "exit_code": ended.exit_code, "seconds": ended.seconds}


def _job(options: Mapping[str, Any]) -> Job:
    from runtime.device import find_devices
    from runtime.launch import prepare

    plan, overrides, devices = Path(options["plan"]), list(options["overrides"]), find_devices()
    if options["local"]:
        plan = _scaled_down(plan, devices, quiet=options["quiet"] or options["as_json"])
    return prepare(
        plan,
        overrides,
        devices=devices,
        max_restarts=options["max_restarts"],
        master_port=options["master_port"],
        module=options["module"],
    )


def _scaled_down(plan: Path, devices: Devices, *, quiet: bool) -> Path:
    """Write the rehearsal's config.yaml beside the plan, in `local/`, and say what it leaves out."""
    from runtime.launch_local import write_scaled_down

    path, scaled = write_scaled_down(plan, devices)
    if not quiet:
        click.echo(f"--local: {scaled.config.layout.name} in {path}", err=True)
        for note in scaled.notes:
            click.echo(f"  {note}", err=True)
    return path


def _ranks(job: Job) -> str:
    devices, ranks = job.devices, job.config.world_size
    if devices.kind != "cpu":
        return f"{ranks} ranks on {devices.kind} ({devices.backend})"
    shared = ", shared" if ranks > devices.count else ""
    return f"{ranks} ranks on {devices.count} CPU cores{shared} ({devices.backend})"


def _object(job: Job) -> dict[str, object]:
    devices = {"kind": job.devices.kind, "count": job.devices.count, "notes": list(job.devices.notes)}
    return {
        "config": str(job.config_path),
        "layout": job.config.layout.name,
        "ranks": job.config.world_size,
        "devices": devices,
        "command": list(job.command),
        "variables": dict(job.variables),
        "logs": str(job.logs),
    }


def _show(job: Job, *, as_json: bool) -> None:
    """Everything that a start would do, nothing done."""
    if as_json:
        click.echo(json.dumps({"schema": 1, "launch": {**_object(job), "dry_run": True}}))
        return
    from runtime.launch_command import shell_line

    click.echo(f"{job.config.layout.name}: {_ranks(job)}")
    for note in job.devices.notes:
        click.echo(f"note: {note}")
    click.echo("\nvariables")
    for name, value in sorted({**job.variables, "PYTHONSAFEPATH": "1"}.items()):
        own = os.environ.get(name)
        kept = f"  (yours; ours would be {value})" if own not in {None, value} else ""
        click.echo(f"  {name}={own if kept else value}{kept}")
    click.echo(f"\ncommand\n  {shell_line(job.command)}")
    click.echo(f"\nlogs   {job.logs}/")
    click.echo("nothing was started")


def _show_nodes(options: Mapping[str, Any]) -> None:
    from runtime.launch import prepare_nodes
    from runtime.launch_command import shell_line, split_hosts

    hosts = split_hosts(options["nodes"])
    commands, variables = prepare_nodes(
        Path(options["plan"]),
        hosts,
        list(options["overrides"]),
        max_restarts=options["max_restarts"],
        master_port=options["master_port"],
        module=options["module"],
    )
    if options["as_json"]:
        nodes = [{"host": host, "command": command} for host, command in zip(hosts, commands, strict=True)]
        click.echo(json.dumps({"schema": 1, "launch": {"nodes": nodes, "variables": variables}}))
        return
    click.echo("# start these within half an hour of each other; the config has to be at this path on every node")
    for host, command in zip(hosts, commands, strict=True):
        click.echo(f"\n# {host}\n{shell_line(command, dict(sorted(variables.items())))}")


def launch_plan(folder: str, config: str, *, as_json: bool, quiet: bool) -> dict[str, object]:
    """`--launch` behind a search: the plan is written already, and every refusal says where."""
    from cost_models.errors import TitanPlanError
    from runtime.launch import prepare

    try:
        return start(prepare(Path(config)), as_json=as_json, quiet=quiet)
    except TitanPlanError as error:
        message = f"{error.message}; the plan is in {folder}"
        raise TitanPlanError(error.code, message, error.hint, exit_code=error.exit_code) from error
