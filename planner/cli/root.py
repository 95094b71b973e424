"""`titan-plan`: bare, it is the search; with a verb, that verb."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

# Verb -> module, attribute, and the line that `--help` shows without importing it.
_VERBS = {
    "evaluate": ("planner.cli.evaluate", "evaluate", "Predict given layouts from a CSV of runs."),
    "dry-run": (
        "planner.cli.dry_run",
        "dry_run",
        "Run one step of a plan without hardware, beside its prediction.",
    ),
    "launch": ("planner.cli.launch", "launch", "Start a plan, or show what each node must run."),
    "models": ("planner.cli.models", "models", "List the models of the catalogue."),
    "clusters": ("planner.cli.clusters", "clusters", "List the clusters of the catalogue, or draw one."),
    "explain": ("planner.cli.explain", "explain", "Explain a code such as D201: the rule, an example, its source."),
}


class _Root(click.Group):
    """Imports a verb only when it is called."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Names of all verbs."""
        return list(_VERBS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        """The verb, imported."""
        if name not in _VERBS:
            return None
        module, attribute, _ = _VERBS[name]
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Verbs with their lines, none of them imported."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in _VERBS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """A wrong verb is told with the nearest ones."""
        import difflib

        if args and args[0] not in _VERBS:
            near = difflib.get_close_matches(args[0], _VERBS, 2)
            known = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(_VERBS)}"
            raise click.UsageError(f"no such command {args[0]!r}; {known}", ctx)
        return super().resolve_command(ctx, args)


def _was_given(ctx: click.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        import platform

        from planner.answer_json import SCHEMA, tool_name

        click.echo(f"{tool_name()} (plan schema {SCHEMA}, Python {platform.python_version()})")
        ctx.exit()


@click.group(cls=_Root, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", help="Name or size (70B), a model YAML, or a Hugging Face config.json.")
@click.option("--npus", type=int, help="Devices; one die of a 910C counts as one.")
@click.option("--cluster", help="Name or YAML; see `titan-plan clusters`.  [default: atlas-800t-a2, 8 x 64 GB a node]")
@click.option("--seq-len", type=int, help="Tokens of a sequence.  [default: as the model was pre-trained]")
@click.option(
    "--global-batch", type=int, help="Sequences of a step over all devices.  [default: 256, more above 2,048]"
)
@click.option("--precision", help="bf16, fp16 or fp32.  [default: what the device has]")
@click.option("--optimizer", default="adamw", show_default=True, help="adamw, adam or sgd.")
@click.option("--tokens", help="Tokens to train on, such as 2T: adds days and NPU-hours.")
@click.option("--fix", multiple=True, metavar="K=V,...", help="Bind dimensions: --fix tp=4,pp=4.")
@click.option("--max", "most", multiple=True, metavar="K=V,...", help="Bound dimensions: --max tp=8.")
@click.option(
    "--hbm-margin", default="5%", show_default=True, help="Device memory to leave free: 2GiB, 5%; a bare number is GiB."
)
@click.option("--comm-algorithm", default="auto", show_default=True, help="Collectives between nodes: ring, NHR, ...")
@click.option("--calibration", help="YAML of fitted constants.  [default: shipped for the device]")
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Plans to show.")
@click.option(
    "--verify", type=click.IntRange(min=1), metavar="N", help="Run the N best plans dry before they are recommended."
)
@click.option("--out", help="Folder for the files.  [default: titan_runs/DATE-MODEL-NPUS]")
@click.option("--launch", is_flag=True, help="Start the best plan on this machine once it is written.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else there.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no notes.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version.")
@click.pass_context
def cli(ctx: click.Context, /, **options: Any) -> None:  # noqa: ANN401 - click passes what the options say
    """Plan the fastest parallel layout for pre-training a model on Ascend NPUs.

    \b
    titan-plan --model 70B --npus 64
    titan-plan --model 405B --npus 16384 --fix tp=8 --json
    titan-plan --model ./config.json --npus 32 --cluster atlas-200t-a2-box16
    """
    if ctx.invoked_subcommand is not None:
        given = [f"--{name.replace('_', '-')}" for name in options if _was_given(ctx, name)]
        if given:
            raise click.UsageError(
                f"{', '.join(given)} before the verb {ctx.invoked_subcommand}: it takes its options behind it",
                ctx,
            )
        return
    if options["model"] is None and options["npus"] is None:
        click.echo(ctx.get_help())
        return
    for name in ("model", "npus"):
        if options[name] is None:
            raise click.UsageError(f"missing option --{name}", ctx)
    from planner.cli.search import run_search

    run_search(options)
