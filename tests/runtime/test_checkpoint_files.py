"""A checkpoint on disk is whole or passed over, whatever moment a run was killed in."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cost_models.errors import TitanPlanError
from runtime.checkpoint_files import (
    check_checkpoint,
    checkpoint_folder,
    clean,
    partial_of,
    put_in_place,
    sizes_of,
    trim,
    whole_checkpoints,
)
from runtime.checkpoint_record import RECORD
from runtime.config import parse_config
from tests.runtime.test_checkpoint_record import config_of, record_of

if TYPE_CHECKING:
    from pathlib import Path


def write(
    folder: Path, step: int, *, serial: int = 0, run: str = "a", named: bool = True, text: str = "tensors"
) -> Path:
    partial = partial_of(folder, step)
    (partial / "rng").mkdir()
    (partial / "rng" / "rank-0.pt").write_text("state")
    (partial / "__0_0.distcp").write_text(text)
    files = sizes_of(partial, ["rng/rank-0.pt", "__0_0.distcp"])
    record = replace(record_of(config_of()), step=step, serial=serial or step, run=run, files=files)
    path = put_in_place(partial, record)
    return path if named else path.rename(partial)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest(folder: Path) -> str:
    return whole_checkpoints(folder)[0].path.name


def test_the_folder_is_in_the_output_folder_unless_a_path_is_given() -> None:
    def folder(checkpoint: dict[str, object]) -> str:
        training = {"batch_size": 8, "output_dir": "out", "checkpoint": checkpoint}
        return checkpoint_folder(parse_config({"model": {"name": "tiny"}, "training": training}, "case")).as_posix()

    assert folder({}) == "out/checkpoints"
    assert folder({"path": "/shared/here"}) == "/shared/here"


def test_a_folder_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert whole_checkpoints(tmp_path / "no" / "folder") == []
    clean(tmp_path / "no" / "folder")


def test_checkpoints_come_newest_first_and_other_names_are_left_alone(tmp_path: Path) -> None:
    for step in (500, 1500, 1000):
        write(tmp_path, step)
    for other in ("step-7", "step-00000009x", "best"):
        (tmp_path / other).mkdir()
    assert [found.record.step for found in whole_checkpoints(tmp_path)] == [1500, 1000, 500]
    clean(tmp_path)
    trim(tmp_path, 9, "a")
    assert {"step-7", "step-00000009x", "best"} <= set(names(tmp_path))


@pytest.mark.parametrize("harm", ["truncated", "gone", "no record", "half a record", "longer"])
def test_a_torn_checkpoint_is_told_and_passed_over(tmp_path: Path, harm: str) -> None:
    write(tmp_path, 1)
    torn = write(tmp_path, 2)
    tensors, record = torn / "__0_0.distcp", torn / RECORD
    {
        "truncated": lambda: tensors.write_text("ten"),
        "gone": tensors.unlink,
        "no record": record.unlink,
        "half a record": lambda: record.write_text(record.read_text()[:90]),
        "longer": lambda: tensors.write_text("tensors and more"),
    }[harm]()
    told: list[str] = []
    assert [found.path.name for found in whole_checkpoints(tmp_path, told.append)] == ["step-00000001"]
    assert len(told) == 1
    assert "step-00000002 is not whole" in told[0]


def test_what_a_killed_run_left_is_cleaned(tmp_path: Path) -> None:
    write(tmp_path, 1)
    partial_of(tmp_path, 2).joinpath("__0_0.distcp").write_text("half")
    write(tmp_path, 3).rename(tmp_path / "step-00000003.trash")
    clean(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


def test_a_checkpoint_that_only_lacks_its_name_gets_it(tmp_path: Path) -> None:
    write(tmp_path, 1, named=False)
    assert names(tmp_path) == ["step-00000001.partial"]
    clean(tmp_path)
    assert names(tmp_path) == ["step-00000001"]
    assert newest(tmp_path) == "step-00000001"


def test_a_step_that_is_there_is_replaced_by_the_new_one(tmp_path: Path) -> None:
    write(tmp_path, 1, text="old")
    write(tmp_path, 1, serial=2, text="newer")
    assert (tmp_path / "step-00000001" / "__0_0.distcp").read_text() == "newer"
    clean(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


def test_a_checkpoint_without_the_file_of_some_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TitanPlanError, match=r"R756.*rank-1\.pt"):
        sizes_of(partial_of(tmp_path, 1), ["rng/rank-1.pt"])


def test_only_the_newest_of_this_run_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step, run="mine" if step != 2 else "other")
    trim(tmp_path, 2, "mine")
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_the_newest_is_the_last_that_was_written_also_where_training_began_anew(tmp_path: Path) -> None:
    write(tmp_path, 5000, serial=1, run="before")
    write(tmp_path, 500, serial=2, run="now")
    trim(tmp_path, 1, "now")
    assert newest(tmp_path) == "step-00000500"
    assert len(names(tmp_path)) == 2


def test_a_kill_while_old_ones_are_deleted_leaves_no_half_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)

    def killed(_path: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("runtime.checkpoint_files.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            trim(tmp_path, 1, "a")
    assert all(name.endswith(".trash") or (tmp_path / name / "__0_0.distcp").exists() for name in names(tmp_path))
    clean(tmp_path)
    assert newest(tmp_path) == "step-00000003"
    assert not any(name.endswith(".trash") for name in names(tmp_path))


def test_a_file_in_the_place_of_the_folder_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(TitanPlanError, match=r"R754.*cannot be listed"):
        whole_checkpoints(tmp_path / "checkpoints")


def test_a_run_is_refused_before_it_starts_where_the_checkpoint_is_of_another_model(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", 1)

    def check(*, resume: bool, **model: object) -> None:
        training = {"batch_size": 8, "output_dir": str(tmp_path), "checkpoint": {"resume": resume}}
        check_checkpoint(parse_config({"model": {"name": "tiny-moe", **model}, "training": training}, "case"))

    check(resume=True)
    check(resume=False, n_layers=3)
    with pytest.raises(TitanPlanError, match=r"C618.*n_layers"):
        check(resume=True, n_layers=3)


def test_the_check_before_the_start_needs_no_torch() -> None:
    code = "import sys, runtime.checkpoint_files; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=60)
