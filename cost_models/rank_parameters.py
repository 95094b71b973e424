"""The parameters of a virtual stage as one tp or ep rank holds them, in the order of the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cost_models.layout import Layout
    from cost_models.model import ModelSpec

Cut = Literal["columns", "rows", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter on one tp or ep rank, before ZeRO shards it.

    Attributes:
        name: within its unit.
        unit: what is gathered and reduced with it: `embedding`, `layers.N`, `layers.N.experts`, `head`, `root`.
        partial: each tp rank has a part of its gradient.
        deferred: a schedule with split backward computes its gradient later than those of inputs.
    """

    name: str
    unit: str
    shape: tuple[int, ...]
    partial: bool = False
    deferred: bool = False

    @property
    def expert(self) -> bool:
        """Held by the ranks of an expert group."""
        return self.unit.endswith("experts")

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


def chunk_parameters(model: ModelSpec, layout: Layout, stage: int) -> tuple[Parameter, ...]:
    """Parameters of a virtual stage. A tied table that embedding and head of one stage share stays with the root."""
    last = layout.pp * layout.vpp - 1
    tied = model.tied_embeddings and last == 0
    maker = _Maker(model, layout)
    found: list[Parameter] = []
    if stage == 0:
        found += maker.embedding("root" if tied else "embedding")
    for index in stage_layers(model, layout, stage):
        found += maker.layer(index)
    if stage == last:
        found += maker.head("root" if tied else "head", tied=tied)
    return tuple(found)


def stage_layers(model: ModelSpec, layout: Layout, stage: int) -> range:
    """Layers of a virtual stage."""
    layers = layout.stage_layers(model.n_layers)
    start = sum(layers[:stage])
    return range(start, start + layers[stage])


class _Maker:
    """Makes the parameters of one model under one layout."""

    def __init__(self, model: ModelSpec, layout: Layout) -> None:
        self._m, self._x = model, layout

    def embedding(self, unit: str) -> list[Parameter]:
        m = self._m
        found = [self._table(unit)]
        if m.position == "learned":
            found.append(self._whole("positions", unit, (m.positions, m.hidden_dim)))
        return found + (self._norm("norm", unit) if m.embedding_norm else [])

    def head(self, unit: str, *, tied: bool) -> list[Parameter]:
        return ([] if tied else [self._table(unit)]) + self._norm("norm", unit)

    def layer(self, index: int) -> list[Parameter]:
        m, unit = self._m, f"layers.{index}"
        attention = self._latent(unit) if m.mla else self._grouped(unit)
        sparse = m.moe is not None and index >= m.dense_layers
        mlp = self._sparse(unit) if sparse else self._mlp("mlp", unit, m.ffn_dim)
        return [*self._norm("attention_norm", unit), *attention, *self._norm("mlp_norm", unit), *mlp]

    def _table(self, unit: str) -> Parameter:
        rows = -(-self._m.vocab_size // self._x.tp)
        return Parameter(name="weight", unit=unit, shape=(rows, self._m.hidden_dim))

    def _whole(self, name: str, unit: str, shape: tuple[int, ...], *, per_head: bool = False) -> Parameter:
        partial = self._x.tp > 1 and (self._x.sp or per_head)
        return Parameter(name=name, unit=unit, shape=shape, partial=partial)

    def _norm(self, name: str, unit: str) -> list[Parameter]:
        shape = (self._m.hidden_dim,)
        weight = self._whole(f"{name}.weight", unit, shape)
        return [weight, self._whole(f"{name}.bias", unit, shape)] if self._m.norm == "layernorm" else [weight]

    def _linear(self, name: str, unit: str, sizes: tuple[int, int], cut: Cut, *, bias: bool = False) -> list[Parameter]:
        """`sizes` are outputs and inputs. A bias behind rows that are cut is whole, and added to by autograd."""
        outputs, inputs = sizes
        tp = self._x.tp
        shape = (outputs // tp, inputs) if cut == "columns" else (outputs, inputs // tp) if cut == "rows" else sizes
        partial = cut == "whole" and tp > 1 and self._x.sp
        found = [Parameter(name=f"{name}.weight", unit=unit, shape=shape, partial=partial, deferred=True)]
        if bias:
            whole = cut != "columns" and tp > 1 and self._x.sp
            deferred = cut != "rows"
            found.append(Parameter(name=f"{name}.bias", unit=unit, shape=shape[:1], partial=whole, deferred=deferred))
        return found

    def _grouped(self, unit: str) -> list[Parameter]:
        m = self._m
        query, key = m.n_heads * m.head_dim, m.n_kv_heads * m.head_dim
        found: list[Parameter] = []
        for name, width in (("q", query), ("k", key), ("v", key)):
            found += self._linear(name, unit, (width, m.hidden_dim), "columns", bias=m.qkv_bias)
        found += self._linear("out", unit, (m.hidden_dim, query), "rows", bias=m.attention_out_bias)
        if m.qk_norm:
            found += [self._whole(f"{n}_norm.weight", unit, (m.head_dim,), per_head=True) for n in ("q", "k")]
        return found

    def _latent(self, unit: str) -> list[Parameter]:
        m, mla = self._m, self._m.mla
        assert mla is not None  # noqa: S101 - the caller branched on it
        found: list[Parameter] = []
        if mla.q_lora_rank:
            found += self._linear("q_down", unit, (mla.q_lora_rank, m.hidden_dim), "whole", bias=m.qkv_bias)
            found.append(self._whole("q_norm.weight", unit, (mla.q_lora_rank,)))
        source = mla.q_lora_rank or m.hidden_dim
        found += self._linear("q_up", unit, (m.n_heads * mla.qk_head_dim, source), "columns")
        latent = mla.kv_lora_rank + mla.qk_rope_head_dim
        found += self._linear("kv_down", unit, (latent, m.hidden_dim), "whole", bias=m.qkv_bias)
        found.append(self._whole("kv_norm.weight", unit, (mla.kv_lora_rank,)))
        wide = m.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        found += self._linear("kv_up", unit, (wide, mla.kv_lora_rank), "columns")
        return found + self._linear(
            "out", unit, (m.hidden_dim, m.n_heads * mla.v_head_dim), "rows", bias=m.attention_out_bias
        )

    def _mlp(self, name: str, unit: str, width: int) -> list[Parameter]:
        m = self._m
        found: list[Parameter] = []
        for part in ("gate", "up") if m.gated_mlp else ("up",):
            found += self._linear(f"{name}.{part}", unit, (width, m.hidden_dim), "columns", bias=m.mlp_bias)
        return found + self._linear(f"{name}.down", unit, (m.hidden_dim, width), "rows", bias=m.mlp_bias)

    def _sparse(self, unit: str) -> list[Parameter]:
        m, x, moe = self._m, self._x, self._m.moe
        assert moe is not None  # noqa: S101 - the caller branched on it
        held, width = (moe.experts // x.ep, moe.ffn_dim) if x.ep > 1 else (moe.experts, moe.ffn_dim // x.tp)
        found = [self._whole("shared_gate", unit, (1, m.hidden_dim))] if moe.shared_gate else []
        found.append(self._whole("router.weight", unit, (moe.experts, m.hidden_dim)))
        into = ("gate", "up") if m.gated_mlp else ("up",)
        shapes = [(name, (held, width, m.hidden_dim)) for name in into] + [("down", (held, m.hidden_dim, width))]
        found += [Parameter(name=n, unit=f"{unit}.experts", shape=s, deferred=True) for n, s in shapes]
        return found + (self._mlp("shared", unit, moe.shared_ffn_dim) if moe.shared_ffn_dim else [])
