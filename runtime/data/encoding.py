"""Documents to one flat row of tokens, each document ended by eos, some thousand documents at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .demo import demo_documents
from .documents import Piece, document_pieces, file_pieces
from .remote import remote_texts
from .sources import Demo, Files, Source
from .tables import token_chunks
from .tokenizer import Tokenizer

_MOST_CHARACTERS: Final = 1 << 20
_MOST_PIECES: Final = 4096


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens in the order of the data, and how many documents end among them."""

    tokens: NDArray[np.uint32]
    documents: int


def encoded(source: Source, tokenizer: Tokenizer, text_key: str) -> Iterator[Chunk]:
    """Tokens of all of the data, the same for the same data, in bounded memory.

    Raises:
        TitanPlanError: what reading the data raises.
    """
    if isinstance(source, Files):
        for file in source.files:
            if file.kind == "tokens":
                yield from (Chunk(tokens, 0) for tokens in token_chunks(file))
            else:
                yield from _encoded(file_pieces(file, text_key), tokenizer)
        return
    texts = demo_documents() if isinstance(source, Demo) else remote_texts(source, text_key)
    yield from _encoded((piece for text in texts for piece in document_pieces([text])), tokenizer)


def _encoded(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[Chunk]:
    held: list[Piece] = []
    characters = 0
    for piece in pieces:
        held.append(piece)
        characters += len(piece.text)
        if characters >= _MOST_CHARACTERS or len(held) == _MOST_PIECES:
            yield _chunk(held, tokenizer)
            held, characters = [], 0
    if held:
        yield _chunk(held, tokenizer)


def _chunk(pieces: list[Piece], tokenizer: Tokenizer) -> Chunk:
    eos = np.array([tokenizer.eos], dtype=np.uint32)
    parts: list[NDArray[np.uint32]] = []
    for piece, ids in zip(pieces, tokenizer.encode([piece.text for piece in pieces]), strict=True):
        parts += [ids, eos] if piece.ends else [ids]
    return Chunk(np.concatenate(parts), sum(piece.ends for piece in pieces))
