"""Files are there whole, all of them, or as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cost_models.whole_files import write_whole


def test_all_files_are_written_as_they_are(tmp_path: Path) -> None:
    texts = {tmp_path / "a.csv": "a,b\r\n1,2\r\n", tmp_path / "b.txt": "漢字\n"}
    write_whole(texts)
    assert {path: path.read_bytes().decode() for path in sorted(tmp_path.iterdir())} == texts


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_a_file_has_the_mode_that_the_users_mask_gives(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_whole({tmp_path / "a": ""})
        assert os.umask(mask) == mask, "the mask itself stays"
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_name_as_long_as_a_name_can_be_is_fine(tmp_path: Path) -> None:
    write_whole({tmp_path / ("x" * 255): "x"})
    assert (tmp_path / ("x" * 255)).read_text() == "x"


@pytest.mark.parametrize("wrong", ["a folder", "no such folder"])
def test_none_is_written_where_one_cannot_be(tmp_path: Path, wrong: str) -> None:
    first = tmp_path / "first"
    first.write_text("before")
    (tmp_path / "folder").mkdir()
    second = tmp_path / "folder" if wrong == "a folder" else tmp_path / "none" / "second"
    with pytest.raises(OSError, match="directory"):
        write_whole({first: "after", second: "x"})
    assert first.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "folder"]


def test_an_interruption_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, mode: int) -> None:
        raise KeyboardInterrupt(path, mode)

    monkeypatch.setattr(Path, "chmod", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole({tmp_path / "a": "x"})
    assert not list(tmp_path.iterdir())
