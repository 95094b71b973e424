"""Reading errors of other libraries and answering them: what a chain of them says, and what to try, in short."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

_MOST: Final = 200


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it was raised from or while, and what a checkpoint wraps of each rank."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        # torch's CheckpointException: rank -> (error, its traceback)
        failures = getattr(one, "failures", None)
        wrapped = [entry[0] for entry in failures.values()] if isinstance(failures, dict) else []
        left += [cause for cause in (*wrapped, one.__cause__, one.__context__) if isinstance(cause, BaseException)]


def shorten_text(text: str) -> str:
    """The first line that says something, without the source file that it came from; for the middle of a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else "no reason given"
    if first.startswith("[") and "] " in first:
        first = first.partition("] ")[2]
    # gloo goes on with advice of its own, which ours replaces.
    first = first.partition(" This is typically caused by")[0]
    return first if len(first) <= _MOST else first[: _MOST - 4] + " ..."


def in_order(tries: list[str]) -> str:
    """What to try, numbered, on one line: hints are one line wherever they are shown."""
    return "; ".join(f"{number}. {text}" for number, text in enumerate(tries, 1))
