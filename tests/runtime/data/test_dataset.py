"""From options to sequences: what is checked before a run, and what its tokens are."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers

from cost_models.errors import TitanPlanError
from runtime.config import DatasetOptions
from runtime.data import TokenSequences, check_dataset, open_tokens
from runtime.data.demo import demo_documents


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(vocab_size: int = 512, seq_len: int = 4, **options: str) -> TokenSequences:
    check_dataset(DatasetOptions(**options), vocab_size)
    return open_tokens(
        DatasetOptions(**options), seq_len=seq_len, vocab_size=vocab_size, seed=0, cache_dir=Path("cache")
    )


def refused(vocab_size: int = 512, **options: str) -> TitanPlanError:
    with pytest.raises(TitanPlanError) as caught:
        check_dataset(DatasetOptions(**options), vocab_size)
    return caught.value


def spelled(tokens: np.ndarray) -> list[str]:  # type: ignore[type-arg]
    """Documents of byte tokens."""
    return bytes(np.where(tokens < 256, tokens, 0).astype("u1")).decode().split("\0")


def words() -> str:
    inner = Inner(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "</s>": 799}, unk_token="[UNK]"))  # noqa: S106
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save("tokenizer.json")
    return "tokenizer.json"


def test_the_demo_needs_no_file_and_writes_none(here: Path) -> None:
    rows = opened(vocab_size=258, seq_len=128)
    assert spelled(rows.tokens) == [*demo_documents(), ""]
    assert rows.n_sequences > 250
    assert list(here.iterdir()) == []
    assert rows.digest == opened(seq_len=64).digest


def test_documents_of_all_kinds_are_joined_in_order_with_eos_after_each() -> None:
    Path("d").mkdir()
    Path("d/a.txt").write_text("one\n\nstill one", encoding="utf-8")
    Path("d/b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "two"}\n\n{"text": "\xe9\x9b\xaa"}\n'))
    Path("d/c.txt").write_text("", encoding="utf-8")
    np.save("d/d.npy", np.array([104, 105, 256, 511], np.int32))
    rows = opened(path="d")
    assert spelled(rows.tokens) == ["one\n\nstill one", "two", "雪", "hi", "", ""]
    assert rows.description.startswith("d (2 text, 1 jsonl, 1 tokens): 3 documents, 27 tokens")


def test_a_local_tokenizer_is_used() -> None:
    Path("a.txt").write_text("a b c a", encoding="utf-8")
    assert opened(vocab_size=800, path="a.txt", tokenizer=words()).tokens.tolist() == [1, 2, 0, 1, 799]


def test_tokens_that_do_not_fit_the_model_are_refused_with_both_numbers_and_the_keys() -> None:
    Path("a.txt").write_text("a b", encoding="utf-8")
    for error in (refused(799, path="a.txt", tokenizer=words()), refused(799, tokenizer="tokenizer.json")):
        assert error.code == "C624"
        assert "799, vocab_size of the model is 799" in error.message
        assert "model.vocab_size to 800" in error.hint
        assert "training.dataset.tokenizer" in error.hint
    assert "257, vocab_size of the model is 257" in refused(257).message


def test_ready_tokens_need_no_tokenizer_and_are_checked_as_they_are() -> None:
    np.save("a.npy", np.array([1, 2, 3, 4, 90], np.int64))
    assert opened(vocab_size=91, path="a.npy").tokens.tolist() == [1, 2, 3, 4, 90]
    with pytest.raises(TitanPlanError, match=r"C624.*up to 90.*is 90"):
        opened(vocab_size=90, path="a.npy")


def test_the_first_document_is_tried_before_the_run() -> None:
    Path("a.jsonl").write_text('{"body": "x"}\n', encoding="utf-8")
    assert "a.jsonl:1: no key 'text'" in refused(path="a.jsonl").message
    assert opened(path="a.jsonl", text_key="body", seq_len=1).tokens.tolist() == [120, 256]
    Path("a.txt").write_bytes(b" \n\n")
    assert refused(path="a.txt").code == "C621"


def test_too_few_tokens_are_refused_with_the_numbers() -> None:
    Path("a.txt").write_text("abc", encoding="utf-8")
    with pytest.raises(TitanPlanError, match=r"C621.*4 tokens.*4 \+ 1 = 5"):
        opened(path="a.txt")


def test_a_changed_file_is_tokenised_again() -> None:
    Path("a.txt").write_text("first", encoding="utf-8")
    first = opened(path="a.txt")
    Path("a.txt").write_text("other", encoding="utf-8")
    os.utime("a.txt", (1, 1))
    second = opened(path="a.txt")
    assert (spelled(first.tokens), spelled(second.tokens)) == (["first", ""], ["other", ""])
    assert first.digest != second.digest


def test_moving_the_data_keeps_the_cache() -> None:
    Path("d").mkdir()
    Path("d/a.txt").write_text("words", encoding="utf-8")
    opened(path="d")
    Path("d").rename("e")
    before = sorted(Path("cache").iterdir())
    opened(path="e")
    assert sorted(Path("cache").iterdir()) == before


def test_a_file_that_changes_while_it_is_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.txt").write_text("words", encoding="utf-8")
    identities = iter([[1], [2]])
    monkeypatch.setattr("runtime.data.dataset._identity", lambda _source: next(identities))
    with pytest.raises(TitanPlanError, match=r"C622.*changed while"):
        opened(path="a.txt")


def test_the_order_of_lines_in_memory_does_not_decide_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of one document or of many give one and the same row of tokens."""
    lines = [json.dumps({"text": f"line {number}"}) for number in range(50)]
    Path("a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    together = opened(path="a.jsonl").tokens.tolist()
    monkeypatch.setattr("runtime.data.encoding._MOST_PIECES", 1)
    Path("a.jsonl").rename("b.jsonl")
    assert opened(path="b.jsonl").tokens.tolist() == together


def test_a_remote_name_is_checked_without_a_call_outward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.data.remote.find_spec", lambda _name: object())
    check_dataset(DatasetOptions(name="org/name"), 512)
    monkeypatch.setattr("runtime.data.remote.find_spec", lambda _name: None)
    assert refused(name="org/name").code == "C625"


def test_checking_does_not_import_torch_nor_pyarrow() -> None:
    program = (
        "import sys\n"
        "from runtime.config import DatasetOptions\n"
        "from runtime.data import check_dataset\n"
        "check_dataset(DatasetOptions(), 512)\n"
        "print([name for name in ('torch', 'pyarrow', 'tokenizers', 'pandas') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_digest_is_of_the_tokens_not_of_where_they_lay() -> None:
    lines = [json.dumps({"text": text}) for text in demo_documents()]
    Path("demo.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert opened(path="demo.jsonl").digest == opened(name="demo").digest
