"""The wheel: it holds the packages with their data, nothing else, and runs where nobody has our source tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cost_models", "planner", "reports", "runtime", "configs")
INSTALLED_AS = {"configs": "titan_plan_configs"}
_SETUPTOOLS = 77  # pyproject.toml: license expressions
_USED = {".py", ".yaml", ".typed"}


def _built_without_network() -> bool:
    try:
        return int(metadata.version("setuptools").partition(".")[0]) >= _SETUPTOOLS
    except metadata.PackageNotFoundError:
        return False


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: `build/` of the source tree would lend it files that were deleted long ago."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*ROOMS, "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    isolation = ("--no-build-isolation",) if _built_without_network() else ()
    _pip("wheel", str(source), "--no-deps", "--wheel-dir", str(out), *isolation)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def target(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed in a folder of its own."""
    folder = tmp_path_factory.mktemp("target")
    _pip("install", "--no-deps", "--target", str(folder), str(wheel))
    return folder


def _run(program: str, target: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(target), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_wheel_holds_every_source_and_data_file_of_the_rooms_and_nothing_else(names: set[str]) -> None:
    expected = {
        "/".join((INSTALLED_AS.get(room, room), *path.relative_to(ROOT / room).parts))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in _USED and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_wheel_has_top_level_names_that_nobody_else_uses_for_data(names: set[str]) -> None:
    top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"cost_models", "planner", "reports", "runtime", "titan_plan_configs"}


def test_wheel_says_that_it_is_typed(names: set[str]) -> None:
    assert {f"{room}/py.typed" for room in ROOMS if room not in INSTALLED_AS} <= names


def test_wheel_has_the_command_and_the_licence(wheel: Path, names: set[str]) -> None:
    (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    points = zipfile.ZipFile(wheel).read(f"{info}/entry_points.txt").decode()
    assert "titan-plan = planner.cli:main" in points
    assert f"{info}/licenses/LICENSE" in names


def test_installed_wheel_plans_in_a_folder_whose_own_packages_have_our_names(target: Path, tmp_path: Path) -> None:
    for name in ("configs", "runtime", "planner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not ours')\n", encoding="utf-8")
    program = "from planner.cli import main; main(['--model', 'tiny', '--npus', '8', '--cluster', 'local', '--json'])"
    done = _run(program, target, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    plans = json.loads(done.stdout)
    assert plans["plans"]
    assert Path(tmp_path / plans["files"]["config"]).read_text(encoding="utf-8")


def test_installed_wheel_reads_its_own_data(target: Path, tmp_path: Path) -> None:
    program = "import cost_models.resources as r; print(r.__file__); print(r.configs_dir())"
    source, data = _run(program, target, tmp_path).stdout.splitlines()
    assert Path(source).is_relative_to(target)
    assert str(target) in data
