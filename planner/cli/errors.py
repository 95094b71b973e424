"""How failures leave the program: one line and a hint on stderr, or one JSON object on stdout; never a traceback."""

from __future__ import annotations

import json
import os
import sys
from io import TextIOWrapper

import click

from cost_models.errors import TitanPlanError

_USAGE, _STOPPED = "C617", "R710"
_INTERRUPTED = 130


def run(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    as_json = "--json" in arguments
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a name shows its escape; it is no reason to fail after the work is done.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        from planner.cli.root import cli

        # Without its standalone mode click returns the code of an Exit, and what the verb returned otherwise.
        code = cli.main(args=arguments, prog_name="titan-plan", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        return _tell(_usage(error), as_json=as_json)
    except TitanPlanError as error:
        return _tell(error, as_json=as_json)
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as left:
        # click and rich leave by themselves where the reader has, with a code that here means something else.
        if isinstance(left.__context__, BrokenPipeError):
            return _reader_gone()
        raise
    except (KeyboardInterrupt, click.exceptions.Abort):
        return _tell(TitanPlanError(_STOPPED, "interrupted", "run it again", exit_code=_INTERRUPTED), as_json=as_json)
    except (OSError, UnicodeEncodeError) as error:
        # stdout on a full disk, or a terminal that cannot show a name: nothing of ours is wrong, and nothing is lost.
        return _tell(TitanPlanError("C603", f"cannot write the answer: {error}", "write it elsewhere"), as_json=as_json)


def _reader_gone() -> int:
    """The reader has left, for example `| head`. Python would complain once more when it closes stdout."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _usage(error: click.ClickException) -> TitanPlanError:
    """A complaint of click in our form; its own text already names option and value."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "titan-plan"
    return TitanPlanError(_USAGE, " ".join(error.format_message().split()), f"see `{command} --help`")


def _tell(error: TitanPlanError, *, as_json: bool) -> int:
    """Tell it where it can be told; the exit code says it in any case."""
    try:
        if as_json:
            body = {"code": error.code, "message": error.message, "hint": error.hint}
            click.echo(json.dumps({"schema": 1, "error": body}))
        else:
            click.echo(f"error[{error.code}]: {error.message}", err=True)
            if error.hint:
                click.echo(f"hint: {error.hint}", err=True)
    except BrokenPipeError:
        _reader_gone()
    except OSError:
        pass
    return error.exit_code
