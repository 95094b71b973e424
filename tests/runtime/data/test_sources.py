"""What a name or a path resolves to, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from cost_models.errors import TitanPlanError
from runtime.config import DatasetOptions
from runtime.data.sources import Demo, Files, Remote, find_source


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"")


def names(path: str) -> list[str]:
    source = find_source(DatasetOptions(path=path))
    assert isinstance(source, Files)
    return [file.name for file in source.files]


def refused(**options: str) -> TitanPlanError:
    with pytest.raises(TitanPlanError) as caught:
        find_source(DatasetOptions(**options))
    assert caught.value.exit_code == 2
    return caught.value


def test_demo_is_the_default_even_where_a_folder_has_its_name() -> None:
    touch("demo/a.txt")
    assert find_source(DatasetOptions()) == Demo()
    assert names("demo") == ["a.txt"]


def test_a_path_goes_before_the_name() -> None:
    touch("a.txt")
    source = find_source(DatasetOptions(name="llama2_chinese", path="a.txt"))
    assert isinstance(source, Files)


@pytest.mark.parametrize("name", ["llama2_chinese", "./llama2_chinese", "llama2_chinese/a.jsonl", "org/data"])
def test_a_name_that_is_here_is_a_path(name: str) -> None:
    touch("llama2_chinese/a.jsonl", "org/data/b.txt")
    assert isinstance(find_source(DatasetOptions(name=name)), Files)


@pytest.mark.parametrize(
    ("name", "remote"),
    [
        ("org/name", Remote(name="org/name")),
        ("hf:org/name", Remote(name="org/name")),
        ("hf:wikitext:wikitext-2-raw-v1@main", Remote(name="wikitext", config="wikitext-2-raw-v1", revision="main")),
    ],
)
def test_a_name_of_the_hub(name: str, remote: Remote) -> None:
    assert find_source(DatasetOptions(name=name)) == remote


@pytest.mark.parametrize(
    "name", ["llama2_chinese", "c4", "./org/name", "/org/name", "org/name.jsonl", "here/nothing", "a/b/c", "~x/y", ""]
)
def test_any_other_name_is_an_error_that_says_where_was_looked_and_what_would_do(here: Path, name: str) -> None:
    touch("here/a.txt")
    error = refused(name=name)
    assert error.code == "C620"
    assert name in error.message
    assert not name or name.startswith("/") or str(here) in error.message
    assert all(way in error.hint for way in ("dataset: demo", "{path: FILE_OR_FOLDER}", "hf:ORG/NAME"))


@pytest.mark.parametrize("path", ["nothing", "nothing/at/all.txt", "a\0b", "x" * 5000, "org/name", "hf:org/name"])
def test_a_path_that_is_not_here_is_never_looked_for_elsewhere(path: str) -> None:
    error = refused(path=path)
    assert error.code == "C620"
    assert len(error.message) < 500


def test_a_folder_is_read_sorted_and_deep_by_known_endings() -> None:
    touch("d/b.txt", "d/a/z.JSONL.GZ", "d/a/b/c.parquet", "d/e.arrow", "d/f.npy", "d/g.ndjson")
    touch("d/.hidden.txt", "d/.git/x.txt", "d/h.pdf", "d/i.parquet.gz", "d/txt", "d/雪.txt.gz")
    assert names("d") == ["a/b/c.parquet", "a/z.JSONL.GZ", "b.txt", "e.arrow", "f.npy", "g.ndjson", "雪.txt.gz"]


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.parquet.gz", "a.json"])
def test_a_file_of_another_kind_is_refused_with_the_known_endings(name: str) -> None:
    touch(name)
    error = refused(path=name)
    assert error.code == "C621"
    assert ".jsonl" in error.hint


def test_a_folder_without_data_is_refused() -> None:
    touch("d/README.md", "d/e/f.pdf")
    assert "holds no data" in refused(path="d").message


def test_links_in_a_circle_end_and_each_folder_is_read_once() -> None:
    touch("d/a/x.txt", "far/y.txt")
    os.symlink("..", "d/a/up")
    os.symlink("../far", "d/far")
    os.symlink("../far", "d/far2")
    os.symlink("loop", "d/loop")
    assert names("d") == ["a/x.txt", "far/y.txt"]


def test_folders_nested_beyond_reason_are_refused() -> None:
    Path("d").mkdir()
    os.chdir("d")
    for _ in range(1200):
        Path("d").mkdir()
        os.chdir("d")
    for _ in range(1201):
        os.chdir("..")
    assert "inside each other" in refused(path="d").message
    subprocess.run(["rm", "-r", "d"], check=True)


def test_a_data_file_that_is_a_broken_link_is_not_passed_over() -> None:
    touch("d/a.txt")
    os.symlink("nowhere", "d/b.txt")
    error = refused(path="d")
    assert error.code == "C603"
    assert "b.txt" in error.message


def saved(folder: str, *files: str) -> None:
    touch(f"{folder}/dataset_info.json", *(f"{folder}/{name}" for name in files))
    listed = {"_data_files": [{"filename": name} for name in files]}
    Path(folder, "state.json").write_text(json.dumps(listed), encoding="utf-8")


def test_a_saved_data_set_is_what_its_state_lists() -> None:
    saved("s", "data-00000-of-00002.arrow", "data-00001-of-00002.arrow")
    touch("s/cache-123.arrow", "s/notes.txt")
    assert names("s") == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    Path("s/data-00001-of-00002.arrow").unlink()
    error = refused(path="s")
    assert (error.code, "data-00001-of-00002.arrow" in error.message) == ("C622", True)


@pytest.mark.parametrize("state", ["", "{}", "[]", '{"_data_files": [1]}', '{"_data_files": [{}]}'])
def test_a_saved_data_set_with_a_broken_state_is_refused(state: str) -> None:
    touch("s/dataset_info.json")
    Path("s/state.json").write_text(state, encoding="utf-8")
    assert "state.json" in refused(path="s").message


def test_of_saved_splits_train_is_read() -> None:
    touch("splits/dataset_dict.json")
    saved("splits/test", "data.arrow")
    error = refused(path="splits")
    assert "splits: test" in error.message
    saved("splits/train", "data.arrow")
    assert names("splits") == ["train/data.arrow"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_refused() -> None:
    touch("d/a.txt", "d/b/c.txt")
    Path("d/b").chmod(0)
    try:
        assert refused(path="d").code == "C603"
        assert refused(path="d/b/c.txt").code == "C603"
    finally:
        Path("d/b").chmod(0o700)
