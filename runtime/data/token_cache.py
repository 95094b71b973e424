"""The token cache: a flat file of tokens with an index, in place whole or not at all."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.errors import TitanPlanError

from .cache_lock import exclusive
from .complaints import reason
from .encoding import Chunk

FORMAT: Final = 1
"""Raised when the same data would give another file."""
_DIGEST_BYTES: Final = 16
_TELL_S: Final = 10.0
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIndex:
    """What tokens-KEY.json says of tokens-KEY.bin.

    Attributes:
        dtype: uint16 or uint32, little-endian.
        tokens: in the file.
        documents: that end in it.
        largest: token; -1 for no tokens.
        digest: hash of the tokens.
    """

    dtype: str
    tokens: int
    documents: int
    largest: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """An opened cache; the tokens are a memory map."""

    tokens: NDArray[np.unsignedinteger[Any]]
    index: TokenIndex


def token_dtype(size: int) -> str:
    """The narrowest of the two types for tokens below `size`."""
    return "<u2" if size <= 1 << 16 else "<u4"


def token_digest(tokens: NDArray[np.unsignedinteger[Any]]) -> str:
    """The digest that a cache of these tokens has."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=_DIGEST_BYTES).hexdigest()


def cached_tokens(
    folder: Path, identity: Mapping[str, object], chunks: Callable[[], Iterable[Chunk]], dtype: str
) -> CachedTokens:
    """Open the cache of data with this identity; build it where it is missing, torn or of other data.

    Args:
        folder: of all caches; made where missing.
        identity: all that decides the tokens.
        chunks: begins to tokenise.
        dtype: of `token_dtype`.

    Raises:
        TitanPlanError: R740 the folder cannot be written; what tokenising raises.
    """
    base = folder / f"tokens-{_key({'format': FORMAT, 'dtype': dtype, **identity})}"
    found = _open(base)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(base.with_suffix(".lock")) as alone:
            found = _open(base)
            if found is not None:
                return found
            if alone:
                _remove_leftovers(base)
            return _build(base, identity, chunks(), dtype)
    except OSError as error:
        problem = f"{folder}: the token cache cannot be written ({reason(error)})"
        hint = "it needs a folder that may be written, with 2 or 4 bytes free for each token"
        raise TitanPlanError("R740", problem, hint, exit_code=3) from None


def _key(identity: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def _open(base: Path) -> CachedTokens | None:
    """None for a cache that is missing or not whole."""
    data = base.with_suffix(".bin")
    try:
        values = json.loads(base.with_suffix(".json").read_text(encoding="utf-8"))
        index = TokenIndex(**{key: values[key] for key in TokenIndex.__dataclass_fields__})
        dtype = np.dtype(index.dtype)
        if data.stat().st_size != index.tokens * dtype.itemsize:
            return None
        tokens = np.memmap(data, dtype, mode="r") if index.tokens else np.empty(0, dtype)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return CachedTokens(tokens=tokens, index=index)


def _build(base: Path, identity: Mapping[str, object], chunks: Iterable[Chunk], dtype: str) -> CachedTokens:
    partial = base.with_suffix(f".{socket.gethostname()}-{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            index = _write(file, chunks, np.dtype(dtype))
            _flush(file)
        partial.replace(base.with_suffix(".bin"))
        with partial.open("w", encoding="utf-8") as file:
            json.dump({**asdict(index), "identity": identity}, file, indent=1)
            _flush(file)
        partial.replace(base.with_suffix(".json"))
        _flush_folder(base.parent)
    finally:
        partial.unlink(missing_ok=True)
    found = _open(base)
    if found is None:
        raise OSError(f"{base.with_suffix('.bin')} is not what was written")
    return found


def _write(file: IO[bytes], chunks: Iterable[Chunk], dtype: np.dtype[Any]) -> TokenIndex:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    tokens, documents, largest = 0, 0, -1
    told = time.monotonic()
    for chunk in chunks:
        data = chunk.tokens.astype(dtype)
        file.write(data.tobytes())
        digest.update(data.tobytes())
        tokens, documents = tokens + data.size, documents + chunk.documents
        largest = max(largest, int(chunk.tokens.max(initial=0))) if data.size else largest
        if time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            _LOG.info("tokenising: %s tokens of %s documents", f"{tokens:,}", f"{documents:,}")
    return TokenIndex(dtype=dtype.str, tokens=tokens, documents=documents, largest=largest, digest=digest.hexdigest())


def _flush(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """A rename is on the disk only with its folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_leftovers(base: Path) -> None:
    """Of builders that were killed: while the lock is held no other builds here; other machines may have own locks."""
    for path in base.parent.glob(f"{base.name}.{socket.gethostname()}-*.partial"):
        path.unlink(missing_ok=True)
