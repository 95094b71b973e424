"""Documents of text and JSON lines: nothing lost, and complaints that name the file and the line."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.errors import TitanPlanError
from runtime.data import documents
from runtime.data.documents import document_pieces, file_pieces
from runtime.data.sources import DataFile


def read(path: Path, content: bytes, key: str = "text") -> list[str]:
    """Documents of a file with this content."""
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return texts(path, key)


def texts(path: Path, key: str = "text") -> list[str]:
    kind = "text" if ".txt" in path.name else "jsonl"
    found = [""]
    for piece in file_pieces(DataFile(path=path, name=path.name, kind=kind), key):
        found[-1] += piece.text
        found += [""] * piece.ends
    assert found.pop() == ""
    return found


def refused(path: Path, content: bytes, key: str = "text") -> TitanPlanError:
    with pytest.raises(TitanPlanError) as caught:
        read(path, content, key)
    return caught.value


@settings(deadline=None)
@given(chunks=st.lists(st.text("a b\n"), max_size=6), limit=st.integers(1, 9))
def test_pieces_join_to_the_document_and_are_short(chunks: list[str], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_PIECE", limit)
        pieces = list(document_pieces(chunks))
    text = "".join(chunks)
    assert "".join(piece.text for piece in pieces) == (text if pieces else "")
    assert pieces or not text.strip()
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)
    assert all(len(piece.text) <= limit for piece in pieces)


def test_a_long_document_is_cut_after_lines_else_after_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_PIECE", 8)
    assert [piece.text for piece in document_pieces(["one\ntwo\nthree four five"])] == [
        "one\ntwo\n",
        "three",
        " four",
        " five",
    ]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert read(path, "雪\r\n\n\nsnow".encode()) == ["雪\n\n\nsnow"]
    assert read(path, b"\xef\xbb\xbfmarked") == ["marked"]
    assert read(path, b"") == []
    assert read(path, b" \n\n\t\n") == []


def test_a_text_file_larger_than_a_piece_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_PIECE", 64)
    text = "".join(f"line {number} ü 雪\n" for number in range(500))
    assert read(tmp_path / "a.txt", text.encode()) == [text]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_each_json_line_is_a_document(tmp_path: Path, name: str) -> None:
    lines = [json.dumps({"text": "one\ntwo"}), "", "  ", json.dumps({"id": 1, "text": "雪"}, ensure_ascii=False)]
    lines += ['{"text": ""}', '{"text": " \\n"}', '{"text": null}', '{"text": "last"}']
    assert read(tmp_path / name, "\r\n".join(lines).encode()) == ["one\ntwo", "雪", "last"]
    assert read(tmp_path / name, b'\xef\xbb\xbf{"text": "marked"}\n') == ["marked"]
    assert read(tmp_path / name, b"") == []
    assert read(tmp_path / name, b'{"body": "x", "text": 3}', "body") == ["x"]


def test_half_a_surrogate_pair_is_replaced_and_a_whole_one_kept(tmp_path: Path) -> None:
    assert read(tmp_path / "a.jsonl", b'{"text": "a\\ud800b \\uD83D\\uDE00"}') == ["a\ufffdb \U0001f600"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": oops}', "not JSON (Expecting value, column 10)"),
        (b"plain text", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["text"]', "a JSON list, not an object"),
        (b"3", "a JSON int, not an object"),
        (b'{"body": 1, "id": 2}', "no key 'text'; keys: body, id"),
        (b"{}", "no key 'text'; keys: none"),
        (b'{"text": 5}', "text is a int, not text"),
        (b'{"text": ["a"]}', "text is a list, not text"),
        (b'{"text": "\xff"}', "not UTF-8 text"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    error = refused(tmp_path / "a.jsonl", b'{"text": "good"}\n\n' + line + b"\n")
    assert error.code == "C622"
    assert f"{tmp_path / 'a.jsonl'}:3: " in error.message
    assert words in error.message
    assert len(error.message) < 500


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_LONGEST_LINE_BYTES", 100)
    error = refused(tmp_path / "a.jsonl", b'{"text": "a"}\n' + b"x" * 101)
    assert "a.jsonl:2: the line is longer" in error.message


def test_a_text_in_another_encoding_is_refused_with_the_line(tmp_path: Path) -> None:
    error = refused(tmp_path / "a.txt", "one\ntwo\nö\n".encode("latin-1"))
    assert error.code == "C622"
    assert "a.txt:3: not UTF-8" in error.message
    assert "iconv" in error.hint
    assert "a.txt.gz:2:" in refused(tmp_path / "a.txt.gz", b"one\n\xff\xfe").message
    assert "a.txt:1:" in refused(tmp_path / "a.txt", "雪".encode()[:2]).message


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
@pytest.mark.parametrize("damage", ["cut", "no gzip", "flipped"])
def test_a_broken_packed_file_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / name
    packed = bytearray(gzip.compress(b'{"text": "' + os.urandom(500).hex().encode() + b'"}\n'))
    packed[100] ^= 255 * (damage == "flipped")
    path.write_bytes({"cut": bytes(packed[:-20]), "no gzip": b"plain", "flipped": bytes(packed)}[damage])
    with pytest.raises(TitanPlanError) as caught:
        texts(path)
    assert caught.value.code == "C622"
    assert name in caught.value.message


def test_a_file_that_went_away_is_an_error_of_ours(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl", "a.txt.gz"):
        with pytest.raises(TitanPlanError, match=r"C603.*No such file"):
            texts(tmp_path / name)
