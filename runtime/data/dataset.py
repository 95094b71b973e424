"""From `training.dataset` to checked options, and to TokenSequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from cost_models.errors import TitanPlanError

from .complaints import reason
from .encoding import Chunk, encoded
from .remote import check_library
from .sequences import TokenSequences
from .sources import Demo, Files, Source, find_source
from .token_cache import CachedTokens, TokenIndex, cached_tokens, token_digest, token_dtype
from .tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from runtime.config_values import DatasetOptions

_ANY_TOKEN: Final = 2**32


def check_dataset(options: DatasetOptions, vocab_size: int) -> None:
    """Find what would end the run before it begins: cheap, without torch, offline.

    The data exist and their first document is read; the tokenizer loads and fits the model.

    Raises:
        TitanPlanError: C603, C620 - C625.
    """
    source = find_source(options)
    tokenizer = _tokenizer(options, source, vocab_size)
    if isinstance(source, Demo):
        return
    if isinstance(source, Files):
        if next(encoded(source, tokenizer, options.text_key), None) is None:
            raise _no_text(source)
        return
    check_library(source)


def open_tokens(
    options: DatasetOptions, *, seq_len: int, vocab_size: int, seed: int, cache_dir: Path
) -> TokenSequences:
    """Open the tokens of a run; the first process of a machine tokenises them into `cache_dir`, the others wait.

    Args:
        options: as in `training.dataset`.
        seq_len: tokens that a sequence predicts.
        vocab_size: of the model.
        seed: with the epoch it gives the order of sequences.
        cache_dir: folder of token caches; the demo writes none.

    Raises:
        TitanPlanError: as `check_dataset`; C621 too few tokens; C622 broken data; C624; C626; R740.
    """
    source = find_source(options)
    tokenizer = _tokenizer(options, source, vocab_size)
    found = _demo(tokenizer) if isinstance(source, Demo) else _cached(source, tokenizer, options.text_key, cache_dir)
    if not found.index.tokens and isinstance(source, Files):
        raise _no_text(source)
    if found.index.largest >= vocab_size:
        raise _too_large("the data", found.index.largest, vocab_size)
    return TokenSequences(
        tokens=found.tokens,
        seq_len=seq_len,
        vocab_size=vocab_size,
        seed=seed,
        digest=found.index.digest,
        description=_description(source, tokenizer, found.index),
    )


def _tokenizer(options: DatasetOptions, source: Source, vocab_size: int) -> Tokenizer:
    tokenizer = load_tokenizer(options.tokenizer)
    if _has_text(source) and tokenizer.size > vocab_size:
        raise _too_large(f"tokenizer {tokenizer.name}", tokenizer.size - 1, vocab_size)
    return tokenizer


def _too_large(what: str, largest: int, vocab_size: int) -> TitanPlanError:
    problem = f"{what} has tokens up to {largest}, vocab_size of the model is {vocab_size}"
    hint = f"set model.vocab_size to {largest + 1} or more, or training.dataset.tokenizer to one that fits"
    return TitanPlanError("C624", problem, hint)


def _has_text(source: Source) -> bool:
    return not isinstance(source, Files) or any(file.kind != "tokens" for file in source.files)


def _no_text(source: Files) -> TitanPlanError:
    files = f"{len(source.files)} files" if len(source.files) > 1 else "the file"
    return TitanPlanError("C621", f"{source.root}: {files} hold no text", "give files with documents")


def _demo(tokenizer: Tokenizer) -> CachedTokens:
    """In memory: a first run must not fail for a folder that cannot be written."""
    chunks = list(encoded(Demo(), tokenizer, ""))
    tokens = np.concatenate([chunk.tokens for chunk in chunks]).astype(token_dtype(tokenizer.size))
    documents = sum(chunk.documents for chunk in chunks)
    digest = token_digest(tokens)
    index = TokenIndex(
        dtype=tokens.dtype.str, tokens=tokens.size, documents=documents, largest=int(tokens.max()), digest=digest
    )
    return CachedTokens(tokens=tokens, index=index)


def _cached(source: Source, tokenizer: Tokenizer, text_key: str, folder: Path) -> CachedTokens:
    before = _identity(source)
    size = tokenizer.size if _only_text(source) else _ANY_TOKEN

    def chunks() -> Iterator[Chunk]:
        yield from encoded(source, tokenizer, text_key)
        if _identity(source) != before:
            raise TitanPlanError("C622", "training.dataset: files changed while they were read", "start again")

    identity = {"source": before, "tokenizer": tokenizer.digest, "text_key": text_key}
    return cached_tokens(folder, identity, chunks, token_dtype(size))


def _only_text(source: Source) -> bool:
    return not isinstance(source, Files) or all(file.kind != "tokens" for file in source.files)


def _identity(source: Source) -> list[object]:
    """Names, sizes and times of files; of the Hub only what was asked for, since asking it would need the network."""
    if isinstance(source, Files):
        try:
            found = [(file, file.path.stat()) for file in source.files]
        except OSError as error:
            raise TitanPlanError("C603", f"{source.root}: cannot be read ({reason(error)})", "start again") from None
        return [[file.name, info.st_size, info.st_mtime_ns] for file, info in found]
    return [] if isinstance(source, Demo) else ["hub", source.name, source.config, source.revision]


def _description(source: Source, tokenizer: Tokenizer, index: TokenIndex) -> str:
    if isinstance(source, Files):
        kinds = Counter(file.kind for file in source.files)
        what = f"{source.root} ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})"
    else:
        what = "demo" if isinstance(source, Demo) else f"hf:{source.name}"
    by = f" by tokenizer {tokenizer.name}" if _has_text(source) else ""
    return f"{what}: {index.documents:,} documents, {index.tokens:,} tokens{by}"
