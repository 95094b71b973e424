"""Tokenizers: bytes, tokenizer.json with its neighbours, sentencepiece by a stand-in; what is refused."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers

from cost_models.errors import TitanPlanError
from runtime.data.tokenizer import ByteTokenizer, load_tokenizer

WORDS = {"[UNK]": 0, "a": 1, "b": 2, "</s>": 7}


def words(folder: Path, vocabulary: dict[str, int] = WORDS, **neighbours: object) -> Path:
    """A tokenizer.json of whole words, with files beside it."""
    inner = Inner(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.enable_truncation(2)
    inner.enable_padding(length=4)
    folder.mkdir(exist_ok=True, parents=True)
    inner.save(str(folder / "tokenizer.json"))
    for name, values in neighbours.items():
        (folder / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def refused(option: object) -> TitanPlanError:
    with pytest.raises(TitanPlanError) as caught:
        load_tokenizer(str(option))
    return caught.value


@given(st.text())
def test_bytes_spell_the_text(text: str) -> None:
    (ids,) = ByteTokenizer().encode([text])
    assert bytes(ids.astype("u1")).decode() == text


@pytest.mark.parametrize("option", ["", "bytes"])
def test_no_name_is_bytes(option: str) -> None:
    tokenizer = load_tokenizer(option)
    assert (tokenizer.name, tokenizer.size, tokenizer.eos) == ("bytes", 258, 256)


@pytest.mark.parametrize("path", ["", "tokenizer.json"])
def test_a_folder_or_a_file_is_read_and_saved_truncation_is_not_obeyed(tmp_path: Path, path: str) -> None:
    tokenizer = load_tokenizer(str(words(tmp_path) / path))
    assert (tokenizer.size, tokenizer.eos) == (8, 7)
    assert [ids.tolist() for ids in tokenizer.encode(["a b a b c", "", "b"])] == [[1, 2, 1, 2, 0], [], [2]]


def test_the_end_token_is_what_the_files_beside_it_say(tmp_path: Path) -> None:
    vocabulary = {**WORDS, "<stop>": 9}
    plain = words(tmp_path / "1", vocabulary, tokenizer_config={"eos_token": "<stop>"})
    nested = words(tmp_path / "2", vocabulary, special_tokens_map={"eos_token": {"content": "<stop>"}})
    other = words(tmp_path / "3", vocabulary, tokenizer_config={"eos_token": "not there"})
    assert [load_tokenizer(str(folder)).eos for folder in (plain, nested, other)] == [9, 9, 7]
    assert len({load_tokenizer(str(folder)).digest for folder in (plain, nested, other)}) == 2


def test_without_an_end_token_it_is_refused(tmp_path: Path) -> None:
    error = refused(words(tmp_path, {"[UNK]": 0, "a": 1}))
    assert error.code == "C623"
    assert "tokenizer_config.json" in error.hint


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[1, 2"])
def test_broken_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    error = refused(tmp_path)
    assert error.code == "C623"
    assert str(tmp_path / "tokenizer.json") in error.message


@pytest.mark.parametrize("option", ["nothing/here", "meta-llama/Llama-2-7b", "x" * 300, "a\0b"])
def test_missing_ones_are_refused_and_nothing_is_downloaded(option: str) -> None:
    error = refused(option)
    assert error.code == "C623"
    assert "nothing is downloaded" in error.message


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    assert "holds no tokenizer.json or tokenizer.model" in refused(tmp_path).message


def test_sentencepiece_that_is_not_installed_is_told_how_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.data.tokenizer.find_spec", lambda _name: None)
    (tmp_path / "tokenizer.model").write_bytes(b"model")
    error = refused(tmp_path)
    assert error.code == "C625"
    assert "pip install sentencepiece" in error.hint


class _Processor:
    eos = 2

    def __init__(self, model_proto: bytes) -> None:
        if model_proto == b"broken":
            raise RuntimeError("could not parse")

    def get_piece_size(self) -> int:
        return 32000

    def eos_id(self) -> int:
        return self.eos

    def encode(self, texts: list[str], out_type: type) -> list[list[int]]:
        return [[out_type(len(word)) for word in text.split()] for text in texts]


@pytest.fixture
def sentencepiece(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sentencepiece")
    module.__spec__ = ModuleSpec("sentencepiece", None)
    module.SentencePieceProcessor = _Processor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentencepiece", module)


@pytest.mark.usefixtures("sentencepiece")
def test_a_sentencepiece_model_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"model")
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.size, tokenizer.eos) == (32000, 2)
    assert [ids.tolist() for ids in tokenizer.encode(["one three", ""])] == [[3, 5], []]
    monkeypatch.setattr(_Processor, "eos", -1)
    assert "no end-of-document" in refused(path).message
    path.write_bytes(b"broken")
    assert "could not parse" in refused(path).message
