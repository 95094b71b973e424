"""The command line: one file per verb, imported when it is called, so that `--help` stays quick."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `titan-plan`; exits with 0 done, 1 no plan or a run that failed, 2 bad usage or input, 130 interrupted."""
    from planner.cli.errors import run

    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))
