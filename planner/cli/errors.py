"""How failures leave the program: one line and a hint on stderr, or one JSON object on stdout; never a traceback."""

from __future__ import annotations

import json
import os
import sys

import click

from cost_models.errors import TitanPlanError

_USAGE = "C617"
_INTERRUPTED = 130


def run(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    from planner.cli.root import cli

    as_json = "--json" in arguments
    try:
        # Without its standalone mode click returns the code of an Exit, and what the verb returned otherwise.
        code = cli.main(args=arguments, prog_name="titan-plan", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        return _tell(_usage(error), as_json=as_json)
    except TitanPlanError as error:
        return _tell(error, as_json=as_json)
    except BrokenPipeError:
        # The reader has gone, for example `| head`. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (KeyboardInterrupt, click.exceptions.Abort):
        click.echo("interrupted", err=True)
        return _INTERRUPTED
    return 0


def _usage(error: click.ClickException) -> TitanPlanError:
    """A complaint of click in our form; its own text already names option and value."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "titan-plan"
    return TitanPlanError(_USAGE, " ".join(error.format_message().split()), f"see `{command} --help`")


def _tell(error: TitanPlanError, *, as_json: bool) -> int:
    if as_json:
        body = {"code": error.code, "message": error.message, "hint": error.hint}
        click.echo(json.dumps({"schema": 1, "error": body}))
    else:
        click.echo(f"error[{error.code}]: {error.message}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
    return error.exit_code
