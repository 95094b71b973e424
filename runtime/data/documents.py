"""Documents of data files as pieces of text, in bounded memory; every complaint names the file and the line."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import IO, TYPE_CHECKING, Final, NamedTuple, cast

from cost_models.errors import TitanPlanError
from cost_models.yaml_numbers import cut

from .complaints import reason
from .tables import table_texts

if TYPE_CHECKING:
    from pathlib import Path

    from .sources import DataFile

_PIECE: Final = 1 << 20
"""Characters. A tokenizer needs some hundred bytes for each character of what it gets at once."""
_LONGEST_LINE_BYTES: Final = 1 << 28
_BOM: Final = b"\xef\xbb\xbf"
_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")
_MEND: Final = "mend or remove it"


class Piece(NamedTuple):
    """A part of a document; `ends` on its last."""

    text: str
    ends: bool


def file_pieces(file: DataFile, text_key: str) -> Iterator[Piece]:
    """Documents of one file; those without anything but white space are left out.

    Args:
        file: any kind but tokens.
        text_key: key of a JSON line, column of a table.

    Raises:
        TitanPlanError: C603 it cannot be opened; C622 its content is broken, with the line or row.
    """
    if file.kind == "text":
        yield from document_pieces(_text_chunks(file.path))
        return
    texts = _json_texts(file.path, text_key) if file.kind == "jsonl" else table_texts(file, text_key)
    with _readable(file.path):
        for text in texts:
            yield from document_pieces(text[start : start + _PIECE] for start in range(0, len(text), _PIECE))


def document_pieces(chunks: Iterable[str]) -> Iterator[Piece]:
    """One document, cut after white space where it is longer than a piece."""
    held, begun = "", False
    for chunk in chunks:
        held += chunk
        while len(held) > _PIECE:
            end = _cut(held)
            yield Piece(held[:end], False)
            held, begun = held[end:], True
    if begun or held.strip():
        yield Piece(held, True)


def _cut(text: str) -> int:
    """After the last line, else the last space: what a tokenizer would not join anyway."""
    return text.rfind("\n", 0, _PIECE) + 1 or max(text.rfind(" ", 1, _PIECE), 0) or _PIECE


def _text_chunks(path: Path) -> Iterator[str]:
    with _readable(path):
        try:
            with _open(path) as stream, TextIOWrapper(stream, encoding="utf-8-sig") as text:
                while chunk := text.read(_PIECE):
                    yield chunk
        except UnicodeDecodeError as error:
            raise _not_text(path, _first_broken_line(path), error) from None


def _first_broken_line(path: Path) -> int:
    with _open(path) as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 0


def _json_texts(path: Path, key: str) -> Iterator[str]:
    with _open(path) as stream:
        for number, line in enumerate(_lines(stream, path), 1):
            raw = line.removeprefix(_BOM) if number == 1 else line
            if raw.strip():
                yield _text_of(raw, key, path, number)


def _lines(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    number = 0
    while line := stream.readline(_LONGEST_LINE_BYTES):
        number += 1
        if len(line) == _LONGEST_LINE_BYTES:
            problem = f"{path}:{number}: the line is longer than {_LONGEST_LINE_BYTES >> 20} MiB"
            raise TitanPlanError("C622", problem, "one JSON object a line is needed; is it the right file?")
        yield line


def _text_of(line: bytes, key: str, path: Path, number: int) -> str:
    """The document of a line; null is an empty one. Half a surrogate pair, which no tokenizer takes, is replaced."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _not_text(path, number, error) from None
    except (ValueError, RecursionError) as error:
        what = f"{error.msg}, column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else reason(error)
        problem = f"{path}:{number}: not JSON ({what})"
        raise TitanPlanError("C622", problem, "one JSON object a line is needed") from None
    if not isinstance(record, dict):
        problem = f"{path}:{number}: a JSON {type(record).__name__}, not an object"
        raise TitanPlanError("C622", problem, f'a line looks like {{"{key}": "..."}}')
    if key not in record:
        keys = ", ".join(map(str, list(record)[:8])) or "none"
        hint = "set training.dataset.text_key to the key of the text"
        raise TitanPlanError("C622", f"{path}:{number}: no key {key!r}; keys: {cut(keys, 200)}", hint)
    text = record[key]
    if not isinstance(text, str | None):
        hint = "set training.dataset.text_key to the key of the text"
        raise TitanPlanError("C622", f"{path}:{number}: {key} is a {type(text).__name__}, not text", hint)
    return _HALF_PAIR.sub("\ufffd", text) if text and b"\\ud" in line.lower() else text or ""


def _not_text(path: Path, number: int, error: UnicodeDecodeError) -> TitanPlanError:
    where = f"{path}:{number}" if number else str(path)
    hint = "convert it: iconv -f ENCODING -t UTF-8"
    return TitanPlanError("C622", f"{where}: not UTF-8 text ({error.reason})", hint)


def _open(path: Path) -> IO[bytes]:
    packed = path.name.lower().endswith(".gz")
    return cast("IO[bytes]", gzip.open(path, "rb")) if packed else path.open("rb")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What goes wrong below a file, in our words."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TitanPlanError("C622", f"{path}: the packed file is broken ({reason(error)})", _MEND) from None
    except OSError as error:
        raise TitanPlanError(
            "C603", f"{path}: cannot be read ({reason(error)})", "check the file and its rights"
        ) from None
