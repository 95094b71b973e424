"""Which room imports which, and what no file may do."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Each room and the other rooms that it may import.
ROOMS = {
    "cost_models": set[str](),
    "runtime": {"cost_models"},
    "reports": {"cost_models"},
    "planner": {"cost_models", "runtime", "reports"},
}
HEAVY = {"torch", "pandas", "optuna", "networkx", "plotly"}
LONGEST_FILE = 600
SOURCES = sorted(path for room in (*ROOMS, "configs", "tests") for path in (ROOT / room).rglob("*.py"))
PACKAGE_SOURCES = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ROOMS]
_TEXTS = {".py", ".yaml", ".yml", ".md", ".toml", ".csv", ".json", ".sh", ""}


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in PACKAGE_SOURCES}


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _imports(path: Path, *, at_start: bool) -> set[str]:
    """Absolute names that a file imports; `at_start`: only what importing the file itself imports."""
    found: set[str] = set()
    left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        if at_start and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _base(path, node)
            found |= {base} | {f"{base}.{name.name}" for name in node.names}
        elif isinstance(node, ast.If) and at_start and _for_types_only(node):
            left += node.orelse
        else:
            left += ast.iter_child_nodes(node)
    return found


def _base(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.relative_to(ROOT).parent.parts
    return ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))


def _roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", PACKAGE_SOURCES, ids=_id)
def test_rooms_import_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    ours = _roots(_imports(path, at_start=False)) & {*ROOMS, "configs", "tests"}
    assert ours - {room} <= ROOMS[room]


def test_no_import_loop() -> None:
    """Not even through functions or for types; a package's own __init__ is not counted as its submodules' import."""
    graph = {name: _imports(path, at_start=False) & MODULES.keys() - {name} for name, path in MODULES.items()}
    assert list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_no_import_reaches_into_the_parent_folder(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level > 1] == []


@pytest.mark.parametrize("path", PACKAGE_SOURCES, ids=_id)
def test_heavy_libraries_are_imported_where_they_are_used(path: Path) -> None:
    allowed = {"torch"} if path.relative_to(ROOT).parts[0] == "runtime" else set[str]()
    assert _roots(_imports(path, at_start=True)) & HEAVY <= allowed


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from planner.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("Usage: titan-plan")
    assert set(done.stderr.split()) & {*HEAVY, "numpy", "rich", "yaml", "pydantic", "jinja2"} == set()


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_files_fit_a_sitting(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONGEST_FILE


@pytest.mark.parametrize("path", PACKAGE_SOURCES, ids=_id)
def test_a_file_says_first_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    places = re.compile("|".join(f"(?<![\\w.~]){place}" for place in ("/wor" + "k/", "/hom" + "e/", "/roo" + "t/")))
    folders = [ROOT / name for name in (*ROOMS, "configs", "docs", "tests", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    texts = [path for path in files if path.suffix in _TEXTS and "__pycache__" not in path.parts]
    assert [_id(path) for path in texts if places.search(path.read_text(encoding="utf-8"))] == []
