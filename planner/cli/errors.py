"""How failures leave the program: one line and a hint on stderr, or one JSON object on stdout; never a traceback."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING

import click

from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_USAGE, _STOPPED = "C617", "R710"
_INTERRUPTED, _TERMINATED = 130, 143


class _Termination(KeyboardInterrupt):
    """SIGTERM, as batch systems send it before they kill; what ends well at Ctrl-C ends well at this too."""


def run(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    as_json = "--json" in arguments
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a name shows its escape; it is no reason to fail after the work is done.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _terminates():
            return _called(arguments)
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
    except (KeyboardInterrupt, click.exceptions.Abort) as stop:
        ended = isinstance(stop, _Termination) or isinstance(stop.__cause__, _Termination)
        what, code = ("terminated", _TERMINATED) if ended else ("interrupted", _INTERRUPTED)
        return _tell(TitanPlanError(_STOPPED, what, "run it again", exit_code=code), as_json=as_json)
    except (OSError, UnicodeEncodeError) as error:
        # stdout on a full disk, or a terminal that cannot show a name: nothing of ours is wrong, and nothing is lost.
        return _tell(TitanPlanError("C603", f"cannot write the answer: {error}", "write it elsewhere"), as_json=as_json)


def _called(arguments: list[str]) -> int:
    from planner.cli.root import cli

    # Without its standalone mode click returns the code of an Exit, and what the verb returned otherwise.
    code = cli.main(args=arguments, prog_name="titan-plan", standalone_mode=False)
    if sys.stdout is not None:
        sys.stdout.flush()
    return code if isinstance(code, int) else 0


@contextmanager
def _terminates() -> Iterator[None]:
    """SIGTERM ends the verb as Ctrl-C does: what was begun is cleared away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        raise _Termination

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
