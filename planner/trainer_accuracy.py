"""Predicted peak memory against the trainer's own, over layouts drawn by chance, as a Markdown page.

    python -m planner.trainer_accuracy --run 304 --jobs 2 --results results.jsonl -o docs/accuracy-trainer.md

Dry runs take minutes to hours: what the file of results has is not run again, and without `--run` nothing is.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import warnings
from collections import defaultdict
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from cost_models.errors import TitanPlanError

from .dry_compare import TOLERANCE, predict_rank, room_of
from .quantities import parse_memory
from .question import DEFAULT_MARGIN
from .trainer_cases import TrainerCase, TrainerResult, draw_cases, read_results, run_case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_WORST = 10
_INTRODUCTION = """# Accuracy against the trainer

Predicted against the trainer's own peak of live device memory, over {count} layouts drawn at random from the valid ones
of {models} on {devices} devices, whatever they need. The trainer's is that
of a dry run (`titan-plan dry-run`): one step under fake tensors, counted storage by storage. Written by
`python -m planner.trainer_accuracy{drawn}`.

Reading: an error is predicted / found - 1 of the first rank of the pipeline stage that is predicted to be the fullest.
`median`, `p95` and `most` are of its absolute value, `bias` is its median with its sign.

"""


def page(results: Sequence[TrainerResult], drawn: str = "") -> str:
    """The page of some results, one or more; `drawn` are the arguments that draw them."""
    rows = [(result, difference(result)) for result in results]
    cases = [result.case for result in results]
    models = ", ".join(sorted({case.model for case in cases}))
    devices = sorted({case.n_devices for case in cases})
    text = _INTRODUCTION.format(count=len(rows), models=models, devices=f"{devices[0]} to {devices[-1]}", drawn=drawn)
    text += _fitting(results)
    text += _table("all", rows, lambda _case: "all")
    for name, of in _GROUPS.items():
        text += _table(name, rows, of)
    return text + _worst(rows)


_GROUPS: dict[str, Callable[[TrainerCase], str]] = {
    "model": lambda case: case.model,
    "schedule": lambda case: case.layout.schedule,
    "ZeRO": lambda case: str(case.layout.zero),
    "recompute": lambda case: case.layout.recompute,
    "precision": lambda case: case.precision,
}


def _fitting(results: Sequence[TrainerResult]) -> str:
    called, near = [fits(result) for result in results], [fits(result, "0") for result in results]
    return (
        f"A search, which leaves {DEFAULT_MARGIN} of the device free, calls {sum(said for said, _ in called)} of them "
        f"fitting; {called.count((True, False))} of these exceed the device in the dry run. To the last byte "
        f"{sum(said for said, _ in near)} are predicted to fit, of which {near.count((True, False))} do not.\n\n"
    )


def difference(result: TrainerResult) -> float:
    """Predicted over found peak, less 1."""
    case = result.case
    return predict_rank(case.setting(), case.layout, case.rank).peak_bytes / result.peak_bytes - 1.0


def fits(result: TrainerResult, margin: str = DEFAULT_MARGIN) -> tuple[bool, bool]:
    """Whether a search that leaves a margin calls the layout fitting, and whether it fits the device as found."""
    case = result.case
    room = room_of(case.setting(), case.layout, case.rank)
    predicted = predict_rank(case.setting(), case.layout, case.rank).peak_bytes
    left = room.usable_bytes - parse_memory("margin", margin, whole_bytes=room.usable_bytes)
    return room.peak_bytes(predicted) <= left, room.peak_bytes(result.peak_bytes) <= room.usable_bytes


def _table(name: str, rows: Sequence[tuple[TrainerResult, float]], of: Callable[[TrainerCase], str]) -> str:
    groups: dict[str, list[float]] = defaultdict(list)
    for result, error in rows:
        groups[of(result.case)].append(error)
    text = f"| {name} | layouts | median | p95 | most | bias |\n|---|---|---|---|---|---|\n"
    for group, errors in sorted(groups.items()):
        sizes = sorted(abs(error) for error in errors)
        p95 = sizes[min(int(0.95 * len(sizes)), len(sizes) - 1)]
        values = (statistics.median(sizes), p95, sizes[-1])
        told = " | ".join(f"{100 * value:.2f} %" for value in values)
        text += f"| {group} | {len(errors)} | {told} | {100 * statistics.median(errors):+.2f} % |\n"
    return text + "\n"


def _worst(rows: Sequence[tuple[TrainerResult, float]]) -> str:
    text = "The largest errors:\n\n| error | model | layout | moment of the peak in the dry run |\n|---|---|---|---|\n"
    for result, error in sorted(rows, key=lambda row: -abs(row[1]))[:_WORST]:
        case = result.case
        text += f"| {100 * error:+.2f} % | {case.model} | {case.layout.name} | {result.moment} |\n"
    return text


def run_missing(path: Path, count: int, jobs: int, seed: int) -> None:
    """Dry-run the drawn cases that the file does not have, and add them to it one by one."""
    had = {_key(result.case) for result in read_results(path)}
    missing = [case for case in draw_cases(count, seed) if _key(case) not in had]
    _cut_torn(path)
    with get_context("spawn").Pool(jobs, _quiet) as pool, path.open("a", encoding="utf-8") as file:
        for number, result in enumerate(pool.imap_unordered(run_case, missing), start=1):
            file.write(result.line() + "\n")
            file.flush()
            sys.stderr.write(f"{number} of {len(missing)}: {result.case.model} {result.case.layout.name}\n")


def _cut_torn(path: Path) -> None:
    """A run that was killed can leave half a line, which the next one would be added to."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def _read(path: Path) -> list[TrainerResult]:
    results = read_results(path)
    if not results:
        raise TitanPlanError("C603", f"{path} has no results", "make some with --run 20")
    return results


def _key(case: TrainerCase) -> tuple[object, ...]:
    """All but the rank, which the prediction chose."""
    return case.model, case.n_layers, case.n_devices, case.seq_len, case.global_batch, case.precision, case.layout


def _quiet() -> None:
    """Of a worker; the one that started it is interrupted and ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    warnings.simplefilter("ignore")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def main(arguments: Iterable[str] | None = None) -> int:
    """The command; 1 where an error is larger than the tolerance or something is wrongly called fitting."""
    parser = argparse.ArgumentParser(prog="python -m planner.trainer_accuracy", description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="file of results, one JSON object a line")
    parser.add_argument("--run", type=_positive, default=0, metavar="COUNT", help="dry-run so many layouts first")
    parser.add_argument("--jobs", type=_positive, default=1)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("-o", "--out", type=Path, help="page to write; stdout otherwise")
    given = parser.parse_args(None if arguments is None else list(arguments))
    try:
        if given.run:
            run_missing(given.results, given.run, given.jobs, given.seed)
        results = _read(given.results)
        text = page(results, f" --run {given.run} --seed {given.seed} --results FILE" if given.run else "")
        if given.out:
            given.out.write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; what was run is kept\n")
        return 130
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except TitanPlanError as error:
        sys.stderr.write(f"{error.code}: {error.message}; {error.hint}\n")
        return 2
    wrong = any(abs(difference(r)) > TOLERANCE or (fits(r)[0] and not fits(r)[1]) for r in results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
