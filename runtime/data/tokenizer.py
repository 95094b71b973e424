"""Tokenizers: our bytes, a tokenizer.json, a sentencepiece tokenizer.model; all local, none is downloaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from cost_models.errors import TitanPlanError

from .complaints import reason
from .sources import user_path

BYTES: Final = "bytes"
_JSON, _MODEL = "tokenizer.json", "tokenizer.model"
_EOS_NAMES: Final = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>", "[EOS]", "<|eos|>")
_NO_TOKENIZER: Final = f"training.dataset.tokenizer is a file or folder of this machine ({_JSON}, {_MODEL}), or `bytes`"


class Tokenizer(Protocol):
    """Text to token ids.

    Attributes:
        name: for the log.
        size: largest id + 1.
        eos: the id that ends a document.
        digest: equal where the ids would be equal.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def eos(self) -> int: ...  # noqa: D102
    @property
    def digest(self) -> str: ...  # noqa: D102

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Ids of each text, without any that the text does not hold."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """The bytes of UTF-8 are 0-255, eos is 256, bos 257; nothing has to be learnt or stored."""

    name: str = BYTES
    size: int = 258
    eos: int = 256
    bos: int = 257
    digest: str = "bytes-1"

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _JsonTokenizer:
    inner: Any
    name: str
    size: int
    eos: int
    digest: str

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        encodings = self.inner.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PieceTokenizer:
    inner: Any
    name: str
    size: int
    eos: int
    digest: str

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        return [np.asarray(ids, dtype=np.uint32) for ids in self.inner.encode(list(texts), out_type=int)]


def load_tokenizer(option: str) -> Tokenizer:
    """The tokenizer that `training.dataset.tokenizer` names; none is our bytes.

    Raises:
        TitanPlanError: C623 it is missing, broken or has no end-of-document token; C625 its library is missing.
    """
    if option in {"", BYTES}:
        return ByteTokenizer()
    path = _file(user_path(option))
    return _load_pieces(path) if path.suffix == ".model" else _load_json(path)


def _file(path: Path) -> Path:
    try:
        candidates = [path / _JSON, path / _MODEL] if path.is_dir() else [path]
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        what = f"the folder {path} holds no {_JSON} or {_MODEL}" if path.is_dir() else f"{path}: there is no such file"
    except OSError as error:
        what = f"{path} cannot be reached ({reason(error)})"
    raise TitanPlanError("C623", f"training.dataset.tokenizer: {what}; nothing is downloaded", _NO_TOKENIZER)


def _load_json(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Inner

    try:
        content = path.read_bytes()
        inner = Inner.from_str(content.decode())
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise _broken(path, error) from None
    inner.no_truncation()  # a file saved with either would silently cut or fill every document
    inner.no_padding()
    vocabulary: dict[str, int] = inner.get_vocab(with_added_tokens=True)
    name = _eos_name(path.parent, vocabulary)
    if name is None:
        problem = f"{path}: it is not known which token ends a document"
        hint = 'put a tokenizer_config.json with {"eos_token": "..."} beside it'
        raise TitanPlanError("C623", problem, hint)
    eos = vocabulary[name]
    digest = hashlib.sha256(content).hexdigest()
    size = max(vocabulary.values()) + 1
    return _JsonTokenizer(inner=inner, name=str(path), size=size, eos=eos, digest=f"{digest}-{eos}")


def _eos_name(folder: Path, vocabulary: dict[str, int]) -> str | None:
    """As the files beside a tokenizer.json say; else the one that is usual."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            eos = json.loads((folder / name).read_text(encoding="utf-8"))["eos_token"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        eos = eos.get("content") if isinstance(eos, dict) else eos
        if isinstance(eos, str) and eos in vocabulary:
            return eos
    return next((name for name in _EOS_NAMES if name in vocabulary), None)


def _load_pieces(path: Path) -> Tokenizer:
    if find_spec("sentencepiece") is None:
        hint = f"pip install sentencepiece, or give the {_JSON} of the same tokenizer"
        raise TitanPlanError("C625", f"{path}: a sentencepiece model needs the library sentencepiece", hint)
    try:
        content = path.read_bytes()
        inner = import_module("sentencepiece").SentencePieceProcessor(model_proto=content)
        size, eos = int(inner.get_piece_size()), int(inner.eos_id())
    except Exception as error:  # noqa: BLE001 - whatever the library raises
        raise _broken(path, error) from None
    if eos < 0:
        raise TitanPlanError("C623", f"{path}: it has no end-of-document token", "use a model with eos_id")
    digest = hashlib.sha256(content).hexdigest()
    return _PieceTokenizer(inner=inner, name=str(path), size=size, eos=eos, digest=digest)


def _broken(path: Path, error: Exception) -> TitanPlanError:
    problem = f"{path}: no tokenizer that can be read ({reason(error)})"
    return TitanPlanError("C623", problem, _NO_TOKENIZER)
