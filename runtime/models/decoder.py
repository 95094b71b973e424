"""A chunk of the decoder: some of its layers, with the embedding before the first and the loss behind the last.

Names of parameters are those of the whole model (`layers.17.mlp.up.weight`), whatever the chunk, so that a checkpoint
knows no layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from runtime.parallel.tensor import vocabulary_embedding

from .layer import Layer
from .loss import LossShape, token_loss
from .norms import Norm

if TYPE_CHECKING:
    from torch import Tensor

    from cost_models.model import ModelSpec

    from .building import Build


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Which part of the model.

    Attributes:
        layers: indices of the layers in the whole model.
        first, last: whether it holds the embedding, and the loss.
        recomputed: how many of its layers, from the first, are recomputed.
    """

    layers: range
    first: bool
    last: bool
    recomputed: int = 0


class Embedding(nn.Module):
    """Token look-up, learned positions and the norm behind them."""

    def __init__(self, model: ModelSpec, build: Build) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(padded_rows(model, build), model.hidden_dim))
        self.positions = (
            nn.Parameter(torch.empty(model.positions, model.hidden_dim)) if model.position == "learned" else None
        )
        self.norm = Norm(model.hidden_dim, model.norm_epsilon, model.norm) if model.embedding_norm else None
        self._build = build

    def forward(self, tokens: Tensor) -> Tensor:
        """(all tokens,) to (own tokens, hidden)."""
        build = self._build
        x = vocabulary_embedding(tokens, self.weight, build.tp)
        if self.positions is not None and build.positions is not None:
            x = x + self.positions[build.positions].repeat_interleave(build.micro_batch, 0)
        return x if self.norm is None else self.norm(x)


class Head(nn.Module):
    """Final norm, output projection and loss.

    Args:
        tied: reads the embedding's table of this chunk instead of one of its own.
    """

    def __init__(self, model: ModelSpec, build: Build, tied: Embedding | None) -> None:
        super().__init__()
        self.norm = Norm(model.hidden_dim, model.norm_epsilon, model.norm)
        rows = padded_rows(model, build)
        self.weight = nn.Parameter(torch.empty(rows, model.hidden_dim)) if tied is None else tied.weight
        self._vocab_size, self._build = model.vocab_size, build

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """(own tokens, hidden) and (all tokens,) to the scaled sum of losses."""
        build = self._build
        shape = LossShape(build.tp, self._vocab_size, build.scale.token)
        return token_loss(self.norm(x), self.weight, labels, shape)


class Decoder(nn.Module):
    """One chunk."""

    def __init__(self, model: ModelSpec, chunk: Chunk, build: Build) -> None:
        super().__init__()
        self.chunk, self.build = chunk, build
        self.embedding = Embedding(model, build) if chunk.first else None
        self.layers = nn.ModuleDict(
            {
                str(index): Layer(model, index, build, first=place == 0, recompute=place < chunk.recomputed)
                for place, index in enumerate(chunk.layers)
            }
        )
        tied = self.embedding if model.tied_embeddings else None
        self.head = Head(model, build, tied) if chunk.last else None

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Tokens (1, all tokens) or hidden states (own tokens, hidden) to hidden states, or to the loss.

        Args:
            labels: (1, all tokens), read by the last chunk.
        """
        if self.embedding is not None:
            x = self.embedding(x[0])
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x, labels[0])


def padded_rows(model: ModelSpec, build: Build) -> int:
    """Rows of the vocabulary on a rank: all ranks hold the same number."""
    return -(-model.vocab_size // build.tp.size)
