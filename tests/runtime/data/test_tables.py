"""Parquet, Arrow and .npy files, a slice at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cost_models.errors import TitanPlanError
from runtime.data import tables
from runtime.data.documents import file_pieces
from runtime.data.sources import DataFile

TEXTS = [f"document {number} 雪" for number in range(700)]


def file(path: Path) -> DataFile:
    kinds = {".parquet": "parquet", ".arrow": "arrow", ".npy": "tokens"}
    return DataFile(path=path, name=path.name, kind=kinds[path.suffix])


def write(path: Path, form: str, table: pa.Table) -> Path:
    if form == "parquet":
        pq.write_table(table, path, row_group_size=300)
        return path
    new = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, 100)
    return path


def read(path: Path, column: str = "text") -> list[str]:
    return [piece.text for piece in file_pieces(file(path), column)]


def refused(path: Path, column: str = "text") -> TitanPlanError:
    with pytest.raises(TitanPlanError) as caught:
        read(path, column)
    assert caught.value.code == "C622"
    assert path.name in caught.value.message
    return caught.value


FORMS = pytest.mark.parametrize(
    ("form", "name"), [("parquet", "a.parquet"), ("stream", "a.arrow"), ("file", "b.arrow")]
)


@FORMS
@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=["string", "large", "dict"]
)
def test_the_column_of_every_row_is_a_document(tmp_path: Path, form: str, name: str, kind: pa.DataType) -> None:
    rows = [*TEXTS, None, "", "last"]
    table = pa.table({"id": list(range(len(rows))), "text": pa.array(rows).cast(kind)})
    assert read(write(tmp_path / name, form, table)) == [*TEXTS, "last"]


@FORMS
def test_a_missing_column_or_one_without_text_is_refused(tmp_path: Path, form: str, name: str) -> None:
    path = write(tmp_path / name, form, pa.table({"id": [1], "list": [["a"]]}))
    assert "no single column 'text'; columns: id, list" in refused(path).message
    assert "text_key" in refused(path).hint
    assert "column id holds int64, not text" in refused(path, "id").message
    assert "column list holds list" in refused(path, "list").message


@FORMS
def test_a_table_without_rows_has_no_documents(tmp_path: Path, form: str, name: str) -> None:
    assert read(write(tmp_path / name, form, pa.table({"text": pa.array([], pa.string())}))) == []


@FORMS
@pytest.mark.parametrize("damage", ["empty", "noise", "cut", "cut short"])
def test_broken_files_are_refused(tmp_path: Path, form: str, name: str, damage: str) -> None:
    content = write(tmp_path / name, form, pa.table({"text": TEXTS})).read_bytes()
    cuts = {"empty": b"", "noise": b"noise" * 9, "cut": content[: len(content) // 2], "cut short": content[:10]}
    (tmp_path / name).write_bytes(cuts[damage])
    refused(tmp_path / name)


@FORMS
def test_text_that_is_not_utf8_is_refused_with_its_row(tmp_path: Path, form: str, name: str) -> None:
    raw = pa.array([b"good", b"\xff\xfe"], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    path = write(tmp_path / name, form, pa.table({"text": broken}))
    assert "row 2" in refused(path).message


def test_npy_tokens_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_TOKENS", 3)
    np.save(tmp_path / "a.npy", np.array([5, 0, 65535, 7], np.uint16))
    assert [chunk.tolist() for chunk in tables.token_chunks(file(tmp_path / "a.npy"))] == [[5, 0, 65535], [7]]
    np.save(tmp_path / "a.npy", np.array([], np.int64))
    assert list(tables.token_chunks(file(tmp_path / "a.npy"))) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.zeros((2, 2), np.int32), "2 dimensions"),
        (np.zeros(3), "float64"),
        (np.array([1, -1]), "-1 is no token"),
        (np.array([1, 2**32]), "4294967296 is no token"),
        (np.array(["a"], object), "no .npy file"),
        (np.array(["a"]), "dimensions of <U1"),
    ],
)
def test_npy_of_anything_else_is_refused(tmp_path: Path, values: np.ndarray, words: str) -> None:  # type: ignore[type-arg]
    np.save(tmp_path / "a.npy", values, allow_pickle=True)
    with pytest.raises(TitanPlanError, match="C622") as caught:
        list(tables.token_chunks(file(tmp_path / "a.npy")))
    assert words in caught.value.message


@pytest.mark.parametrize("content", [b"", b"noise", b"\x93NUMPY"])
def test_a_broken_npy_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(TitanPlanError, match="C622"):
        list(tables.token_chunks(file(tmp_path / "a.npy")))
