"""How fast the search is: layouts a second by what decided them, seconds of whole commands, and their peak memory.

    python benchmarks/search_speed.py [--quick]

One thread (OMP_NUM_THREADS=1). Most layouts of a space cost little: a rule drops them with their whole mesh or row, or
memory does in columns that hundreds of them share. The rate of all layouts therefore says little alone, and rates of
harder work stand beside it: of layouts that keep every rule, and of memory and time evaluated in full.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

# Before NumPy is imported.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import numpy as np

from cost_models.layout import Layouts
from cost_models.memory import MemoryModel
from cost_models.rules import first_violations
from cost_models.step_time import StepTimeModel
from planner.bounds import Bounds
from planner.question import Question, ask
from planner.search import M_DEVICE, M_HOST, SearchResult, search
from planner.space import Space

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = (("70B", 64), ("405B", 16384))
REPEATS = 3
# Parts of the space, evenly spread over it, whose layouts are evaluated in full.
SAMPLED_PARTS = 12
_MOST_FLAT = 50_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the search.")
    parser.add_argument("--quick", action="store_true", help="the small case alone, once")
    quick = parser.parse_args().quick
    repeats = 1 if quick else REPEATS
    print(f"NumPy {np.__version__}, Python {sys.version.split()[0]}, one thread, median of {repeats}\n")
    for model, npus in CASES[:1] if quick else CASES:
        _case(model, npus, repeats)
    seconds, peak_mib, _ = _median_command(["--help"], repeats)
    print(f"titan-plan --help: {seconds:.3f} s, peak {peak_mib:.0f} MiB")


def _case(model: str, npus: int, repeats: int) -> None:
    question = ask(model=model, npus=npus)
    results = [search(question.setting, Bounds(), margin_bytes=question.margin_bytes) for _ in range(repeats)]
    seconds = statistics.median(result.evaluate_s for result in results)
    result = results[0]
    by_memory = sum(result.rejected.get(code, 0) for code in (M_DEVICE, M_HOST))
    valid = by_memory + result.feasible
    print(f"{model} on {npus}: {result.layouts:,} layouts decided in {seconds:.2f} s (searches: {_spread(results)})")
    _row("all layouts", result.layouts, seconds)
    _row("  decided by a rule", result.layouts - valid)
    _row("  decided by memory", by_memory)
    _row("  fit", result.feasible)
    _row("time evaluated, whole rows (bounds prove the rest slower)", result.timed)
    _row("layouts that keep every rule", valid, seconds)
    _full_evaluation(question)
    with tempfile.TemporaryDirectory() as folder:
        options = ["--model", model, "--npus", str(npus), "--json", "--out", folder]
        wall, peak_mib, evaluate_s = _median_command(options, repeats)
    print(
        f"  whole command {wall:.2f} s, of which rules, memory and time {evaluate_s:.2f} s; peak {peak_mib:.0f} MiB\n"
    )


def _full_evaluation(question: Question) -> None:
    """Memory and time of sampled parts, nothing pruned: in columns that share, and as a plain list of layouts."""
    setting, space = question.setting, Space(setting=question.setting, bounds=Bounds())
    parts = [
        part
        for rows in space.rows(space.meshes())
        for part in rows.keep(first_violations(setting, rows.plain()).reshape(-1) < 0).parts()
    ]
    picked = parts[:: max(1, len(parts) // SAMPLED_PARTS)]
    blocks = [part.block() for part in picked]
    kept = [np.flatnonzero(np.broadcast_to(first_violations(setting, b) < 0, b.shape)) for b in blocks]

    def evaluate(layouts: Layouts) -> None:
        np.broadcast_to(StepTimeModel(setting, layouts).step_s(), layouts.shape).sum()
        np.broadcast_to(MemoryModel(setting, layouts).peak_bytes(), layouts.shape).sum()

    seconds = sum(_seconds(evaluate, block) for block in blocks)
    _row("valid ones, memory and time in full, shared columns", sum(map(len, kept)), seconds)
    flat = [block.take(which[:_MOST_FLAT]) for block, which in zip(blocks, kept, strict=True) if len(which)]
    seconds = sum(_seconds(evaluate, layouts) for layouts in flat)
    _row("valid ones, memory and time in full, one by one", sum(layouts.size for layouts in flat), seconds)


def _seconds(work: Callable[[Layouts], None], layouts: Layouts) -> float:
    started = time.perf_counter()
    work(layouts)
    return time.perf_counter() - started


def _median_command(options: list[str], repeats: int) -> tuple[float, float, float]:
    """Wall seconds, peak resident MiB and, of a search, its own seconds, of the median process by wall time."""
    return sorted(_command(options) for _ in range(repeats))[repeats // 2]


# The peak of this very program: `ru_maxrss` of a child starts at what its parent had.
_PROGRAM = """
import sys
from planner.cli.errors import run
code = run(sys.argv[1:])
print(open("/proc/self/status").read(), file=sys.stderr)
sys.exit(code)
"""


def _command(options: list[str]) -> tuple[float, float, float]:
    started = time.perf_counter()
    done = subprocess.run(  # noqa: S603 - our own program and options
        [sys.executable, "-c", _PROGRAM, *options], capture_output=True, text=True, check=True
    )
    wall = time.perf_counter() - started
    peak_kib = next(line.split()[1] for line in done.stderr.splitlines() if line.startswith("VmHWM"))
    searched = json.loads(done.stdout)["searched"]["evaluate_s"] if "--json" in options else 0.0
    return wall, int(peak_kib) / 1024, searched


def _row(what: str, count: int, seconds: float = 0.0) -> None:
    rate = f"{count / seconds / 1e6:>9.2f} M/s" if seconds else ""
    print(f"  {what:<58}{count:>14,}{rate}")


def _spread(results: list[SearchResult]) -> str:
    return ", ".join(f"{result.evaluate_s:.2f}" for result in results)


if __name__ == "__main__":
    main()
