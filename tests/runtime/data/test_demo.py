"""The built-in corpus is the same everywhere."""

from __future__ import annotations

import hashlib

from runtime.data.demo import demo_documents


def test_the_corpus_is_pinned() -> None:
    """Loss curves of examples and checkpoints of demo runs depend on it: a change here is a change for users."""
    text = "".join(demo_documents())
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "faa78b64d5ae2827eae0796ab4b81403be52b7b5c8e47b1f50dae20832c982ef"
    )
    assert 20_000 < len(text) < 40_000


def test_it_is_plain_text_of_different_documents() -> None:
    documents = list(demo_documents())
    assert all(text.isascii() and text.replace("\n", "").isprintable() for text in documents)
    assert len(set(documents)) == len(documents)
