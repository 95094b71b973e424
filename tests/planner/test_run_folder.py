"""The run folder: what the files hold, that they agree, and that none is left half written."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from functools import cache
from pathlib import Path
from typing import IO

import pytest

from cost_models.errors import TitanPlanError
from cost_models.memory import CATEGORIES
from planner import run_folder
from planner.answer import Answer, answer
from planner.answer_json import answer_object
from planner.bounds import parse_bounds
from planner.question import ask
from planner.run_folder import check_folder, default_folder, rejections, write_run
from runtime.config import load_config

FILES = ["config.yaml", "launch.sh", "plans.csv", "rejected.csv", "report.json"]


@cache
def answered(model: str = "tiny", npus: int = 8, fix: str = "") -> Answer:
    bounds = parse_bounds((fix,) if fix else (), ())
    return answer(ask(model=model, npus=npus, global_batch=16, bounds=bounds))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize(
    ("model", "npus", "fix"),
    [
        ("tiny", 8, ""),
        ("tiny", 16, "pp=2,tp=2,schedule=interleaved,zero=3,reduce_gradients=every"),
        ("tiny", 8, "cp=2,cp_kind=ring,recompute=layers=1,offload=on"),
        ("tiny-moe", 8, "ep=4,pp=2,swap=on"),
        ("tiny", 16, "placement=tp-cp-pp-dp"),
        ("405B", 128, "pp=16,schedule=1f1b,tp=8"),
    ],
)
def test_config_reads_back_to_the_best_plan(tmp_path: Path, model: str, npus: int, fix: str) -> None:
    told = answered(model, npus, fix)
    files = write_run(told, tmp_path / "run")
    config = load_config(files["config"])
    best = told.plans[0]
    assert config.layout == best.layout
    assert config.model == told.question.setting.model
    assert config.workload == told.question.setting.workload
    assert config.world_size == npus
    assert config.overrides == ()
    assert config.plan is not None
    assert config.plan.layout == best.id
    assert config.plan.step_time_s == best.step_time_s
    assert config.plan.peak_bytes == best.peak_bytes
    assert dict(config.plan.memory_bytes) == best.memory_bytes


def test_report_is_the_json_answer(tmp_path: Path) -> None:
    files = write_run(answered(), tmp_path)
    report = json.loads(Path(files["report"]).read_text(encoding="utf-8"))
    assert report == json.loads(json.dumps(answer_object(answered(), files)))
    assert {kind: Path(path).exists() for kind, path in files.items()} == dict.fromkeys(files, True)
    assert set(files) == {"folder", "plans", "rejected", "report", "config", "launch"}


def test_plans_csv_has_the_numbers_of_the_report(tmp_path: Path) -> None:
    files = write_run(answered(), tmp_path)
    plans = json.loads(Path(files["report"]).read_text(encoding="utf-8"))["plans"]
    found = rows(Path(files["plans"]))
    assert len(found) == len(answered().listed) >= len(plans) > 2
    for row, plan in zip(found, plans, strict=False):
        assert row["plan_id"] == plan["id"]
        for name in ("step_time_s", "step_time_low_s", "step_time_high_s", "mfu", "hfu", "p_fits"):
            assert float(row[name]) == plan[name]
        assert float(row["tokens_per_s_per_npu"]) == plan["tokens_per_s_per_device"]
        assert float(row["peak_memory_gib"]) * 2**30 == plan["peak_bytes"]
        for name in CATEGORIES:
            assert round(float(row[f"{name}_gib"]) * 2**30) == plan["memory_bytes"][name]
        for name in ("tp", "pp", "dp", "zero", "micro_batch", "schedule", "recompute"):
            assert row[name] == str(plan["layout"][name])


def test_rejected_csv_counts_what_the_report_counts_most_frequent_first(tmp_path: Path) -> None:
    files = write_run(answered(), tmp_path)
    found = rows(Path(files["rejected"]))
    assert {row["code"]: int(row["layouts"]) for row in found} == answered().result.rejected
    counts = [int(row["layouts"]) for row in found]
    assert counts == sorted(counts, reverse=True)
    assert all(row["title"] and row["example"] and row["reason"] for row in found)


def test_layouts_that_memory_ruled_out_show_the_arithmetic() -> None:
    told = answered("llama2-7b", 8)
    by_code = {rejection.code: rejection for rejection in rejections(told)}
    needed, usable = (float(word) for word in by_code["M101"].reason.replace(" GiB", "").split() if "." in word)
    assert needed > usable
    assert usable == pytest.approx(0.95 * 60.97, abs=0.06)


def test_an_older_file_is_replaced_whole(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_text("old " * 100_000, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    write_run(answered(), tmp_path)
    assert names(tmp_path) == sorted([*FILES, "notes.txt"])
    assert all("old old" not in (tmp_path / name).read_text(encoding="utf-8") for name in FILES)
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_where_nothing_fits_no_config_is_left_not_even_an_older_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("of an earlier search", encoding="utf-8")
    files = write_run(answered("70B", 4), tmp_path)
    assert names(tmp_path) == ["plans.csv", "rejected.csv", "report.json"]
    assert "config" not in files
    assert rows(tmp_path / "plans.csv") == []


class FullDisk(io.StringIO):
    """Takes some text, then has no room."""

    def write(self, text: str, /) -> int:
        super().write(text[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("full_from", [1, 2, 4])
def test_a_full_disk_leaves_the_older_files_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_from: int
) -> None:
    for name in FILES:
        (tmp_path / name).write_text("old", encoding="utf-8")
    opened = 0

    def fdopen(handle: int, mode: str, *, encoding: str, newline: str) -> IO[str]:
        nonlocal opened
        opened += 1
        if opened < full_from:
            return open(handle, mode, encoding=encoding, newline=newline)
        os.close(handle)
        return FullDisk()

    monkeypatch.setattr(run_folder.os, "fdopen", fdopen)
    with pytest.raises(TitanPlanError) as error:
        write_run(answered(), tmp_path)
    assert error.value.code == "C603"
    assert os.strerror(errno.ENOSPC) in error.value.message
    assert names(tmp_path) == FILES
    assert all((tmp_path / name).read_text(encoding="utf-8") == "old" for name in FILES)


def test_a_folder_in_the_way_of_a_file_is_an_error_that_leaves_nothing_half(tmp_path: Path) -> None:
    (tmp_path / "plans.csv").mkdir()
    with pytest.raises(TitanPlanError) as error:
        write_run(answered(), tmp_path)
    assert error.value.code == "C603"
    assert names(tmp_path) == ["plans.csv"]


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper" / "still"):
        with pytest.raises(TitanPlanError) as error:
            check_folder(folder)
        assert error.value.code == "C603"
        assert "is a file" in error.value.message
        with pytest.raises(TitanPlanError, match="C603"):
            write_run(answered(), folder)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, to whom every folder is writable.
    monkeypatch.setattr(run_folder.os, "access", lambda path, _mode: Path(path) != tmp_path)
    with pytest.raises(TitanPlanError) as error:
        check_folder(tmp_path / "new")
    assert error.value.code == "C603"
    assert "permission" in error.value.message


def test_a_name_too_long_for_a_folder_is_refused() -> None:
    with pytest.raises(TitanPlanError, match="C603"):
        check_folder(Path("a" * 300))


def test_a_folder_that_can_be_made_passes_and_is_not_made(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    check_folder(tmp_path)
    assert names(tmp_path) == []


def test_the_default_folder_tells_the_search_and_is_never_one_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = default_folder(answered())
    assert first.parent == Path("titan_runs")
    assert first.name.endswith("-tiny-8")
    first.mkdir(parents=True)
    second = default_folder(answered())
    second.mkdir()
    assert second.name == f"{first.name}-2"
    assert default_folder(answered()).name == f"{first.name}-3"
