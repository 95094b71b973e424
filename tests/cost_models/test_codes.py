"""Every code that the source raises is in the table, with one meaning, and none is there in vain."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cost_models.codes import ALL_CODES, CODES, KINDS, Code, find_code
from cost_models.errors import TitanPlanError
from cost_models.rules import RULES

ROOT = Path(__file__).parents[2]
PACKAGES = ("cost_models", "runtime", "planner", "reports", "benchmarks")
SPELLED = re.compile(r"(?:M1|D2|T3|S4|B5|C6|R7)\d\d")
TABLE = ROOT / "cost_models" / "codes.py"


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            if file != TABLE:
                yield str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))


def raised(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Codes passed to an error, a rule or the like: the first argument, or `code=`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        is_error = isinstance(node.func, ast.Name) and node.func.id == "TitanPlanError"
        given = [*(node.args[:1] if is_error else []), *(k.value for k in node.keywords if k.arg == "code")]
        for value in given:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield node.lineno, value.value


def spelled(tree: ast.Module) -> set[str]:
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if SPELLED.fullmatch(text)}


def test_every_code_raised_is_in_the_table() -> None:
    unknown = [f"{name}:{line} {code}" for name, tree in sources() for line, code in raised(tree) if code not in CODES]
    assert not unknown


def test_every_code_in_the_source_is_in_the_table() -> None:
    assert {code for _, tree in sources() for code in spelled(tree)} <= set(CODES)


def test_every_entry_is_used() -> None:
    assert set(CODES) - {code for _, tree in sources() for code in spelled(tree)} == set()


def test_each_code_has_one_meaning() -> None:
    assert [code for code, times in Counter(entry.code for entry in ALL_CODES).items() if times > 1] == []
    assert [title for title, times in Counter(entry.title for entry in ALL_CODES).items() if times > 1] == []


def test_rules_are_told_in_their_own_words() -> None:
    for rule in RULES:
        assert (CODES[rule.code].title, CODES[rule.code].source) == (rule.title, rule.source)


@pytest.mark.parametrize("entry", ALL_CODES, ids=lambda entry: entry.code)
def test_every_entry_is_told(entry: Code) -> None:
    assert SPELLED.fullmatch(entry.code)
    assert entry.kind in KINDS.values()
    assert all((entry.title, entry.explanation.endswith("."), entry.example, entry.source))


def test_a_code_is_found_in_any_case_and_an_unknown_one_names_near_ones() -> None:
    assert find_code("d201").code == "D201"
    with pytest.raises(TitanPlanError) as caught:
        find_code("D299")
    assert "D20" in caught.value.hint
