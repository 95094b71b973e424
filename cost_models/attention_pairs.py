"""Pairs of query and key that attention computes where its kernel cannot skip what the mask hides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cost_models.layout import Column
    from cost_models.model import ModelSpec


def biased(model: ModelSpec) -> bool:
    """Whether scores need more than the causal mask: the mask is then a bias that the kernel adds."""
    return bool(model.sliding_window) or model.position == "alibi"


def biased_pairs(seq_len: int, cp: Column, *, pieces: Column) -> Column:
    """Pairs of a sequence on each of `cp` ranks under a bias.

    Args:
        pieces: where a rank holds an early and a late chunk of 2 cp and attends to the chunks up to each; elsewhere
            every query meets every key.
    """
    chunk = seq_len / (2 * cp)
    return np.where(pieces & (cp > 1), (2 * cp + 1) * chunk**2, seq_len**2 / cp)


def causal_pairs(seq_len: int, cp: Column, *, pieces: Column) -> Column:
    """The same under the causal mask alone, the diagonal included."""
    chunk = seq_len / (2 * cp)
    whole = seq_len * (seq_len + 1) / 2 / cp
    return np.where(pieces & (cp > 1), (2 * cp - 1) * chunk**2 + chunk * (chunk + 1), whole)
