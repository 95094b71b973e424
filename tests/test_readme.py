"""The front page in two languages: its commands run, its output is what the program says, its tree exists.

`python tests/test_readme.py` writes the output of the first command into both.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "README.zh-CN.md")
PAGES = ("CONTRIBUTING.md", "docs/columns.md", "docs/decisions.md", "docs/report_json.md")
FIRST = "titan-plan --model 70B --npus 64"
_FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHOWN_PLANS, _SHOWN_CODES, _WIDTH = 3, 3, 124


def _fences(name: str) -> list[tuple[str, str, str]]:
    """Language, title and text of each fenced block."""
    return _FENCE.findall((ROOT / name).read_text(encoding="utf-8"))


def _commands() -> list[str]:
    return [line for line in _bash_lines() if line.startswith("titan-plan ")]


def _bash_lines() -> list[str]:
    return [line for kind, _, text in _fences(READMES[0]) if kind == "bash" for line in text.splitlines()]


def _run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = "from planner.cli import main; main()"
    arguments = [sys.executable, "-c", program, *command.split()[1:]]
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=300)


def _shortened(output: str) -> str:
    """The first plans and reasons, long lines cut, and without what differs from run to run."""
    lines: list[str] = []
    plans = codes = 0
    for line in output.splitlines():
        plans += bool(re.match(r"\d+  ", line))
        codes += bool(re.match(r"  [A-Z]\d{3} ", line))
        drop = (re.match(r"\d+  ", line) and plans > _SHOWN_PLANS) or (
            re.match(r"  [A-Z]\d{3} ", line) and codes > _SHOWN_CODES
        )
        shown = "..." if drop else line if len(line) <= _WIDTH else line[: _WIDTH - 3].rstrip() + "..."
        if shown != "..." or lines[-1] != "...":
            lines.append(shown.rstrip())
    return "\n".join(lines) + "\n"


def _lasting(output: str) -> str:
    """The output without seconds of this run and today's date."""
    return re.sub(r"titan_runs/\d{4}-", "titan_runs/", re.sub(r"decided in [\d.]+ s", "decided", output))


def _first_output(folder: Path) -> str:
    return _shortened(_run(FIRST, folder).stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the files that the front page shows or copies."""
    for kind, title, text in _fences(READMES[0]):
        if title and kind != "text":
            (tmp_path / title).parent.mkdir(exist_ok=True)
            (tmp_path / title).write_text(text, encoding="utf-8")
    for source, target in (line.split()[1:] for line in _bash_lines() if line.startswith("cp ")):
        shutil.copy(ROOT / source, tmp_path / target)
    return tmp_path


def test_both_languages_have_the_same_commands_and_files() -> None:
    english, chinese = (
        [(kind, title, _uncommented(text)) for kind, title, text in _fences(name) if kind != "text"] for name in READMES
    )
    assert english == chinese


def _uncommented(text: str) -> str:
    """Without comments, which each language has in its own words."""
    return re.sub(r"[ \t]+#.*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))


def test_both_languages_have_the_same_sections() -> None:
    english, chinese = (re.findall(r"^#+", (ROOT / name).read_text("utf-8"), re.MULTILINE) for name in READMES)
    assert english == chinese


@pytest.mark.parametrize("name", READMES)
def test_the_shown_output_is_that_of_the_first_command(name: str, tmp_path: Path) -> None:
    shown = next(text for kind, title, text in _fences(name) if kind == "text" and not title)
    assert _lasting(shown) == _lasting(_first_output(tmp_path)), "refresh: python tests/test_readme.py"


@pytest.mark.parametrize("command", _commands())
def test_each_command_does_what_it_says(command: str, folder: Path) -> None:
    done = _run(command, folder)
    assert (done.returncode, done.stderr if done.returncode else "") == (0, "")
    assert done.stdout or "evaluate" in command or "--local" in command


def test_exit_codes_are_those_of_the_table(tmp_path: Path) -> None:
    assert _run("titan-plan models", tmp_path).returncode == 0
    assert _run("titan-plan --model 70B --npus 8", tmp_path).returncode == 1
    assert _run("titan-plan --model 70B --npus 63", tmp_path).returncode == 2


@pytest.mark.parametrize("name", READMES)
def test_the_tree_names_every_folder(name: str) -> None:
    tree = next(text for _, title, text in _fences(name) if title == "tree")
    named = {line.split()[0].rstrip("/") for line in tree.splitlines()}
    there = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    there = {found for found in there if not found.startswith(".") and found != "build"}
    assert named == there | {"docs"}


@pytest.mark.parametrize("name", [*READMES, *PAGES])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    links = re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", page.read_text(encoding="utf-8"))
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    assert [(link, place) for link, place in links if place and place not in _anchors(page.parent / link)] == []


def _anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", PAGES)
def test_files_named_in_prose_exist(name: str) -> None:
    named = re.findall(r"`((?:configs|cost_models|planner|runtime|reports|tests|docs)/[\w./-]+)`", _text(name))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_page_of_columns_names_every_column() -> None:
    from planner.evaluate import OUTPUT_COLUMNS, STATUSES
    from planner.run_table import READ_COLUMNS
    from reports.plan_tables import PLAN_COLUMNS, REJECTED_COLUMNS

    named = set(re.findall(r"`(\w+)`", _text("docs/columns.md")))
    columns = {*PLAN_COLUMNS, *REJECTED_COLUMNS, *READ_COLUMNS, *OUTPUT_COLUMNS, *STATUSES}
    assert sorted(columns - named) == []


def test_the_page_of_columns_names_every_key_of_a_calibration() -> None:
    from dataclasses import fields

    from cost_models.calibration import Calibration

    named = set(re.findall(r"`(\w+)`", _text("docs/columns.md").partition("## Calibration file")[2]))
    assert sorted({field.name for field in fields(Calibration)} - named) == []


@pytest.mark.parametrize("question", ["--model 70B --npus 16 --tokens 1T", "--model 70B --npus 8"])
def test_the_page_of_the_report_names_every_key(question: str, tmp_path: Path) -> None:
    report = json.loads(_run(f"titan-plan {question} --max tp=8 --json", tmp_path).stdout)
    named = set(re.findall(r"`(\w+)`", _text("docs/report_json.md")))
    free = {"rejected", "fix", "max"}
    assert sorted(_keys(report, free) - named) == []


def _keys(value: object, free: set[str]) -> set[str]:
    """Every key in a JSON value, without what stands below the `free` ones."""
    if isinstance(value, list):
        return {key for item in value for key in _keys(item, free)}
    if not isinstance(value, dict):
        return set()
    return set(value) | {key for name, item in value.items() if name not in free for key in _keys(item, free)}


@pytest.mark.parametrize("name", READMES)
def test_the_quoted_accuracy_is_that_of_its_page(name: str) -> None:
    step, _, ranking = re.findall(r"^\| \*\*all\*\* \|(.*?)\|$", _text("docs/accuracy.md"), re.MULTILINE)[:3]
    rows, _, median, _, bias = (cell.strip() for cell in step.split("|"))
    tau, _, mean_regret, worst_regret = (cell.strip() for cell in ranking.split("|")[2:6])
    sources = _text("docs/accuracy.md").partition("## Ranking")[2].partition("### ")[0].splitlines()
    best_tau = max(re.findall(r"^\| [\w-]+ \| \d+ \| \d+ \| ([\d.]+) \|", "\n".join(sources), re.MULTILINE))
    quoted = (rows, median, bias, tau, best_tau, mean_regret, worst_regret)
    assert [number for number in quoted if number not in _text(name)] == []


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _refresh() -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = _first_output(Path(folder))
    for name in READMES:
        page = re.sub(
            r"^```text\n.*?^```$",
            lambda _: f"```text\n{output}```",
            _text(name),
            count=1,
            flags=re.MULTILINE | re.DOTALL,
        )
        (ROOT / name).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    _refresh()
