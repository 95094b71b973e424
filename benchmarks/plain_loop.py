"""What a plain hand-written PyTorch loop does: the same decoder from stock operators, the same step, one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from cost_models.model import ModelSpec

_EPSILON = 1e-5


class PlainLayer(nn.Module):
    """Attention and SwiGLU behind RMSNorm, as nanochat or picotron write them."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        h, d = model.hidden_dim, model.head_dim
        self.width = d
        self.norm1, self.norm2 = nn.RMSNorm(h, _EPSILON), nn.RMSNorm(h, _EPSILON)
        self.q = nn.Linear(h, model.n_heads * d, bias=False)
        self.k = nn.Linear(h, model.n_kv_heads * d, bias=False)
        self.v = nn.Linear(h, model.n_kv_heads * d, bias=False)
        self.out = nn.Linear(model.n_heads * d, h, bias=False)
        self.gate, self.up = nn.Linear(h, model.ffn_dim, bias=False), nn.Linear(h, model.ffn_dim, bias=False)
        self.down = nn.Linear(model.ffn_dim, h, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = self.norm1(x)
        q, k, v = (part(n).unflatten(-1, (-1, self.width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        n = self.norm2(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class PlainDecoder(nn.Module):
    """Embedding, layers, head, cross entropy."""

    def __init__(self, model: ModelSpec, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_dim)
        self.layers = nn.ModuleList(PlainLayer(model) for _ in range(model.n_layers))
        self.norm = nn.RMSNorm(model.hidden_dim, _EPSILON)
        self.head = nn.Linear(model.hidden_dim, model.vocab_size, bias=False)
        angles = torch.arange(seq_len)[:, None] * 10000.0 ** (-torch.arange(0, model.head_dim, 2) / model.head_dim)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class PlainLoop:
    """Micro batches, clipping, AdamW."""

    def __init__(self, model: ModelSpec, seq_len: int) -> None:
        self.module = PlainDecoder(model, seq_len)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, fused=True)

    def step(self, sequences: Tensor) -> float:
        """Sequences of shape (micro batches, micro batch, seq_len + 1)."""
        total = 0.0
        for part in sequences:
            loss = self.module(part[:, :-1], part[:, 1:]) / sequences.shape[0]
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of halves."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
