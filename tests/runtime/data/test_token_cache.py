"""The token cache: whole or absent, rebuilt when torn or stale, built by one process of many."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cost_models.errors import TitanPlanError
from runtime.data.encoding import Chunk
from runtime.data.token_cache import CachedTokens, cached_tokens, token_dtype

IDENTITY = {"source": [["a.txt", 3, 1]], "tokenizer": "bytes"}


def chunk(*tokens: int) -> Chunk:
    return Chunk(np.array(tokens, dtype=np.uint32), 1)


class Builds:
    """Chunks that count how often they were asked for."""

    def __init__(self, *chunks: Chunk) -> None:
        self.chunks, self.count = chunks, 0

    def __call__(self) -> Iterator[Chunk]:
        self.count += 1
        yield from self.chunks


def built(folder: Path, chunks: Callable[[], Iterator[Chunk]], **identity: object) -> CachedTokens:
    return cached_tokens(folder, {**IDENTITY, **identity}, chunks, "<u2")


def test_tokens_are_built_once_and_mapped(tmp_path: Path) -> None:
    builds = Builds(chunk(1, 2, 3), chunk(), chunk(60000))
    for _ in range(2):
        found = built(tmp_path / "deep" / "er", builds)
        assert isinstance(found.tokens, np.memmap)
        assert (found.tokens.tolist(), found.tokens.dtype) == ([1, 2, 3, 60000], np.uint16)
        assert (found.index.documents, found.index.largest) == (3, 60000)
    assert builds.count == 1


@pytest.mark.parametrize("change", [{"source": []}, {"tokenizer": "other"}, {"text_key": "body"}])
def test_other_data_are_another_cache(tmp_path: Path, change: dict[str, object]) -> None:
    assert built(tmp_path, Builds(chunk(1))).tokens.tolist() == [1]
    assert built(tmp_path, Builds(chunk(2)), **change).tokens.tolist() == [2]
    assert built(tmp_path, Builds(chunk(3))).tokens.tolist() == [1]


def test_the_digest_tells_tokens_apart_and_not_how_they_were_cut(tmp_path: Path) -> None:
    one = built(tmp_path, Builds(chunk(1, 2), chunk(3)), run=1).index.digest
    same = built(tmp_path, Builds(chunk(1), chunk(2, 3)), run=2).index.digest
    other = built(tmp_path, Builds(chunk(1, 2, 4)), run=3).index.digest
    assert one == same != other


def _only(folder: Path, ending: str) -> Path:
    (path,) = folder.glob(f"*{ending}")
    return path


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(_only(folder, ".bin"), 4),
        lambda folder: _only(folder, ".bin").unlink(),
        lambda folder: _only(folder, ".json").unlink(),
        lambda folder: _only(folder, ".json").write_text(""),
        lambda folder: _only(folder, ".json").write_text('{"dtype": "<u2", "tokens": 3'),
        lambda folder: _only(folder, ".json").write_text("[]"),
        lambda folder: _only(folder, ".json").write_text('{"dtype": "nonsense", "tokens": 3}'),
    ],
)
def test_a_torn_cache_is_built_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    builds = Builds(chunk(1, 2, 3))
    built(tmp_path, builds)
    damage(tmp_path)
    assert built(tmp_path, builds).tokens.tolist() == [1, 2, 3]
    assert builds.count == 2


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[Chunk]:
        yield chunk(1)
        raise TitanPlanError("C622", "line 2")

    with pytest.raises(TitanPlanError, match="C622"):
        built(tmp_path, broken)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert built(tmp_path, Builds(chunk(5))).tokens.tolist() == [5]


def test_no_tokens_are_an_empty_cache(tmp_path: Path) -> None:
    assert built(tmp_path, Builds()).tokens.size == 0
    assert built(tmp_path, Builds()).index.largest == -1


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TitanPlanError) as caught:
        built(tmp_path / "file" / "cache", Builds(chunk(1)))
    assert (caught.value.code, caught.value.exit_code) == ("R740", 3)
    assert str(tmp_path / "file") in caught.value.message


def test_a_full_disk_is_an_error_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runtime.data.token_cache.os.fsync", full)
    with pytest.raises(TitanPlanError, match=r"R740.*No space left"):
        built(tmp_path, Builds(chunk(1)))
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_serves_what_it_has_and_refuses_the_rest(tmp_path: Path) -> None:
    built(tmp_path, Builds(chunk(1)))
    tmp_path.chmod(0o500)
    try:
        assert built(tmp_path, Builds(chunk(2))).tokens.tolist() == [1]
        with pytest.raises(TitanPlanError, match=r"R740.*Permission denied"):
            built(tmp_path, Builds(chunk(2)), text_key="body")
    finally:
        tmp_path.chmod(0o700)


def test_without_locks_the_cache_is_built_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_file: object, _how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("runtime.data.cache_lock.fcntl.flock", none)
    assert built(tmp_path, Builds(chunk(1))).tokens.tolist() == [1]


@pytest.mark.parametrize(("size", "dtype"), [(258, "<u2"), (65536, "<u2"), (65537, "<u4"), (2**32, "<u4")])
def test_tokens_are_as_narrow_as_the_vocabulary_allows(size: int, dtype: str) -> None:
    assert token_dtype(size) == dtype


_BUILDER = """
import sys, time
from pathlib import Path
import numpy as np
from runtime.data.encoding import Chunk
from runtime.data.token_cache import cached_tokens
def chunks():
    with open(sys.argv[1] + "/log", "a") as log:
        log.write("build\\n")
    for number in range(10):
        yield Chunk(np.full(1000, number, np.uint32), 1)
        time.sleep(float(sys.argv[2]))
print(cached_tokens(Path(sys.argv[1]), {}, chunks, "<u2").tokens.astype(int).sum())
"""


def builder(folder: Path, pause_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _BUILDER, str(folder), str(pause_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_of_several_processes_one_builds_and_all_read_the_same(tmp_path: Path) -> None:
    ran = [builder(tmp_path, 0.03) for _ in range(3)]
    assert [process.communicate(timeout=60) for process in ran] == [("45000\n", "")] * 3
    assert (tmp_path / "log").read_text(encoding="utf-8") == "build\n"


def test_a_builder_that_was_killed_is_followed_by_another(tmp_path: Path) -> None:
    victim = builder(tmp_path, 30)
    while not list(tmp_path.glob("*.partial")):
        time.sleep(0.01)
        assert victim.poll() is None
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert builder(tmp_path, 0).communicate(timeout=60) == ("45000\n", "")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".bin", ".json", ".lock"]


def test_the_index_says_what_was_tokenised(tmp_path: Path) -> None:
    built(tmp_path, Builds(chunk(1)))
    values = json.loads(_only(tmp_path, ".json").read_text(encoding="utf-8"))
    assert values["identity"] == IDENTITY
