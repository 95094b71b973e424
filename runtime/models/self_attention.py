"""The attention block: projections, query/key norms, rotary embedding, attention, output projection. GQA and MLA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from runtime.parallel.tensor import column_linear, copy_to_region, row_linear

from . import norms
from .attention import AttentionShape, attend
from .mlp import Linear
from .norms import Norm
from .rotary import in_order_of_heads, rotate

if TYPE_CHECKING:
    from torch import Tensor

    from cost_models.model import ModelSpec
    from runtime.memory.saving import Saving

    from .building import Build


def attention_for(model: ModelSpec, build: Build) -> nn.Module:
    """The attention block of a model."""
    return LatentAttention(model, build) if model.mla else GroupedAttention(model, build)


class GroupedAttention(nn.Module):
    """MHA, GQA or MQA; heads are cut over tp."""

    def __init__(self, model: ModelSpec, build: Build) -> None:
        super().__init__()
        query, key = (n * model.head_dim // build.tp.size for n in (model.n_heads, model.n_kv_heads))
        self.q = Linear(model.hidden_dim, query, bias=model.qkv_bias)
        self.k = Linear(model.hidden_dim, key, bias=model.qkv_bias)
        self.v = Linear(model.hidden_dim, key, bias=model.qkv_bias)
        self.out = Linear(query, model.hidden_dim, bias=model.attention_out_bias)
        self.q_norm = Norm(model.head_dim, model.norm_epsilon) if model.qk_norm else None
        self.k_norm = Norm(model.head_dim, model.norm_epsilon) if model.qk_norm else None
        self._width, self._rotates, self._build = model.head_dim, model.position == "rope", build
        self._shape = _shape(model, build)

    def forward(self, x: Tensor, saving: Saving) -> Tensor:
        """Normed own tokens to own tokens, (tokens, hidden)."""
        del saving
        parts = (self.q, self.k, self.v)
        found = column_linear(x, [p.weight for p in parts], [p.bias for p in parts], self._build.tp)
        shape = found[0].shape
        q, k, v = (part.view(-1, self._build.micro_batch, part.shape[1] // self._width, self._width) for part in found)
        del found
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        by_head = self._build.cp.group is None  # else they travel, and the sequence comes first
        if self._rotates and self._build.rotary is not None:
            q, k = rotate(q, self._build.rotary), rotate(k, self._build.rotary, by_head=by_head)
        if by_head:
            k, v = in_order_of_heads(k), in_order_of_heads(v)
        mixed = attend(q, k, v, self._shape)
        return row_linear(mixed.reshape(shape), self.out.weight, self.out.bias, self._build.tp)


class LatentAttention(nn.Module):
    """MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1): latents are made on own tokens with whole weights.

    Then they are gathered: they are far narrower than the hidden states that would be gathered otherwise.
    """

    def __init__(self, model: ModelSpec, build: Build) -> None:
        super().__init__()
        mla = model.mla
        assert mla is not None  # noqa: S101 - `attention_for` asked
        heads, hidden = model.n_heads // build.tp.size, model.hidden_dim
        self.q_down = Linear(hidden, mla.q_lora_rank, bias=model.qkv_bias) if mla.q_lora_rank else None
        self.q_norm = Norm(mla.q_lora_rank, model.norm_epsilon) if mla.q_lora_rank else None
        self.q_up = Linear(mla.q_lora_rank or hidden, heads * mla.qk_head_dim)
        self.kv_down = Linear(hidden, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=model.qkv_bias)
        self.kv_norm = Norm(mla.kv_lora_rank, model.norm_epsilon)
        self.kv_up = Linear(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim))
        self.out = Linear(heads * mla.v_head_dim, hidden, bias=model.attention_out_bias)
        self._mla, self._heads, self._build = mla, heads, build
        self._shape = _shape(model, build)

    def forward(self, x: Tensor, saving: Saving) -> Tensor:
        """Normed own tokens to own tokens, (tokens, hidden)."""
        mla, tp = self._mla, self._build.tp
        source = x
        if self.q_down is not None and self.q_norm is not None:
            source = saving.remake(self.q_norm(_whole(x, self.q_down, self._build)), norms.again)
        latent, turned = _whole(x, self.kv_down, self._build).split((mla.kv_lora_rank, mla.qk_rope_head_dim), -1)
        latent = saving.remake(self.kv_norm(latent.contiguous()), norms.again)
        (q,) = column_linear(source, (self.q_up.weight,), (None,), tp)
        (kv,) = column_linear(latent, (self.kv_up.weight,), (None,), tp)
        shared = copy_to_region(turned.contiguous(), tp)
        mixed = attend(*self._heads_of(q, kv, shared), self._shape)
        return row_linear(mixed.flatten(0, 1).flatten(1), self.out.weight, self.out.bias, tp)

    def _heads_of(self, q: Tensor, kv: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of own heads; all heads share the rotated part of the key."""
        mla, batch = self._mla, self._build.micro_batch
        q = q.view(-1, batch, self._heads, mla.qk_head_dim)
        q_plain, q_turned = q.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), -1)
        kv = kv.view(-1, batch, self._heads, mla.qk_nope_head_dim + mla.v_head_dim)
        k_plain, v = kv.split((mla.qk_nope_head_dim, mla.v_head_dim), -1)
        shared = shared.view(-1, batch, 1, mla.qk_rope_head_dim)
        if self._build.rotary is not None:
            q_turned, shared = rotate(q_turned, self._build.rotary), rotate(shared, self._build.rotary)
        shared = shared.expand(-1, -1, self._heads, -1)
        return torch.cat((q_plain, q_turned), -1), torch.cat((k_plain, shared), -1), v.contiguous()


def _whole(x: Tensor, part: Linear, build: Build) -> Tensor:
    """A linear layer on own tokens whose weight is whole on each rank."""
    (out,) = column_linear(x, (part.weight,), (part.bias,), build.alone)
    return out


def _shape(model: ModelSpec, build: Build) -> AttentionShape:
    assert build.kernel is not None  # noqa: S101 - a model is built for a device
    return AttentionShape(build.kernel, build.cp, model.sliding_window, build.slopes)
