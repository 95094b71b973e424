"""The terminal: colour by option, NO_COLOR and what the stream is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(color: str = "auto", *, stderr: bool = False) -> Console:
    """A rich console; where no terminal is, lines are as long as they need to be."""
    from rich.console import Console

    made = Console(
        stderr=stderr,
        no_color=True if color == "never" else None,
        force_terminal={"always": True, "never": False}.get(color),
        highlight=False,
        soft_wrap=True,
        markup=False,
        emoji=False,
    )
    if not made.is_terminal:
        made.width = 200
    return made
