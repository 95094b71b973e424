"""Cells of one row of a run table: text as a number, a flag or an option; a complaint names the column."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# More than any count of a training run, and far below where products of counts leave 64-bit integers or floats.
_MOST = 10**8
_FLAGS = {"1": True, "1.0": True, "true": True, "yes": True, "0": False, "0.0": False, "false": False, "no": False}


class IncompleteRunError(Exception):
    """A row that says too little, or nothing readable, to predict it.

    Args:
        cause: what it lacks in few words, such as `seq is empty`; rows are counted by it.
        reason: the column, what was got, and what would do.
    """

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause
        self.reason = reason


@dataclass(frozen=True)
class Cells:
    """The cells of one row by lower-case column name, stripped; a column that is absent is an empty cell."""

    values: Mapping[str, str]

    def text(self, column: str) -> str:
        """The cell as it stands."""
        return self.values.get(column, "")

    def whole(self, column: str, *, at_least: int = 1, at_most: int = _MOST) -> int | None:
        """A whole number (`8`, or `8.0` as pandas writes a column with gaps); None where the cell is empty."""
        text = self.text(column)
        if not text:
            return None
        value = _finite(text)
        if value is None or value != int(value) or not at_least <= value <= at_most:
            raise _broken(column, text, f"a whole number from {at_least} to {at_most} is needed")
        return int(value)

    def need(self, column: str) -> int:
        """A whole number that the row must give."""
        value = self.whole(column)
        if value is None:
            raise missing(column)
        return value

    def number(self, column: str) -> float | None:
        """A number above zero; None where the cell is empty."""
        text = self.text(column)
        if not text:
            return None
        value = _finite(text)
        if value is None or not 1e-9 <= value <= 1e9:
            raise _broken(column, text, "a finite number above 0 is needed")
        return value

    def flag(self, column: str) -> bool | None:
        """0 or 1; None where the cell is empty."""
        text = self.text(column)
        if not text:
            return None
        if text.lower() not in _FLAGS:
            raise _broken(column, text, "0 or 1 is needed")
        return _FLAGS[text.lower()]

    def word(self, column: str, known: tuple[str, ...]) -> str | None:
        """One of the known words, in lower case; None where the cell is empty."""
        text = self.text(column).lower()
        if text and text not in known:
            raise _broken(column, text, f"one of {', '.join(known)} is needed")
        return text or None

    @cached_property
    def options(self) -> dict[str, str]:
        """`other_flags` as options: `a=b; c` is {a: b, c: ""}, names in lower case."""
        parts = [part.strip().partition("=") for part in self.text("other_flags").split(";")]
        return {name.strip().lower(): value.strip() for name, _, value in parts if name.strip()}

    def option_count(self, name: str) -> int:
        """A positive whole number of an option; 0 where the option is absent or says otherwise."""
        value = self.options.get(name, "")
        return int(value) if re.fullmatch(r"[0-9]{1,8}", value) else 0


def missing(column: str, hint: str = "") -> IncompleteRunError:
    """The complaint about a cell that may not be empty."""
    return IncompleteRunError(f"{column} is empty", f"{column} is empty{'; ' if hint else ''}{hint}")


def unreadable(column: str, text: str, wanted: str) -> IncompleteRunError:
    """The complaint about a word that is not known."""
    return _broken(column, text, wanted)


def _broken(column: str, text: str, wanted: str) -> IncompleteRunError:
    return IncompleteRunError(f"{column} is not readable", f"{column} is {text[:60]!r}; {wanted}")


def _finite(text: str) -> float | None:
    """The number that a text spells; None for words, NaN, infinities and Python's 1_000."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None
