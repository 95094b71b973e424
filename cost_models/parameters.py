"""Parameters that one rank holds, by part of the model, and the degrees over which data parallelism shards them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cost_models.operators import padded_vocab
from cost_models.schedules import ZB_V

if TYPE_CHECKING:
    from cost_models.layout import Column, Layouts
    from cost_models.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PartParameters:
    """Elements a rank holds of each part; experts apart, since other ranks share them.

    Attributes:
        dense_layer, moe_layer: one layer of the kind, routed experts left out.
        experts: routed experts of one sparse layer.
        embedding, head: first and last stage's extra (norm included).
    """

    dense_layer: Column
    moe_layer: Column
    experts: Column
    embedding: Column
    head: Column

    @classmethod
    def of(cls, model: ModelSpec, layouts: Layouts) -> PartParameters:
        """Elements after cutting by tp (columns and rows of linear layers, vocabulary) and ep (whole experts)."""
        tp = layouts.tp.astype(float)
        vocab = padded_vocab(model.vocab_size, tp) * model.hidden_dim / tp
        embedding_extra = model.embedding_params - model.vocab_size * model.hidden_dim
        attention = _attention(model, tp)
        norms = 2 * model.norm_params
        shared = _mlp(model, model.moe.shared_ffn_dim, tp) if model.moe else np.asarray(0.0)
        gate = model.router_params + (model.hidden_dim if model.moe and model.moe.shared_gate else 0)
        # The last stage of a pipeline holds a copy of a tied embedding; a single stage does not.
        tied_copy = np.where(layouts.pp > 1, vocab, 0.0)
        return cls(
            dense_layer=attention + _mlp(model, model.ffn_dim, tp) + norms,
            moe_layer=attention + norms + shared + gate,
            experts=_experts(model, layouts, tp),
            embedding=vocab + embedding_extra,
            head=(tied_copy if model.tied_embeddings else vocab) + model.norm_params,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one pipeline rank holds.

    Attributes:
        exists: True where the layout has such a rank.
        count: ranks that it stands for; over the telling stages they sum to pp.
        dense_layers, moe_layers: layers over all virtual stages of the rank.
        has_embedding, has_head: 1 where the rank holds them.
        rank: index of the pipeline rank.
    """

    exists: Column
    count: Column
    rank: Column
    dense_layers: Column
    moe_layers: Column
    has_embedding: Column
    has_head: Column

    @property
    def layers(self) -> Column:
        """Layers of the rank."""
        return self.dense_layers + self.moe_layers

    def total(self, dense: Column, moe: Column) -> Column:
        """Sum of a per-layer quantity over the rank's layers."""
        return self.dense_layers * dense + self.moe_layers * moe


def telling_stages(model: ModelSpec, layouts: Layouts) -> tuple[Stage, ...]:
    """First, second and last rank. No other needs more: the second has the most in flight of those without ends.

    Where leading dense layers may run over into the second rank, the third, whose layers all have experts, is told too.
    """
    pp, whole = layouts.pp, layers_per_virtual_stage(model, layouts) * layouts.vpp
    alone = pp == 1
    folded = layouts.schedule == ZB_V
    first_short = layouts.short_first + np.where(alone | folded, layouts.short_last, 0)
    last_short = np.where(alone | folded, 0, layouts.short_last)
    zero, one, last = np.zeros_like(pp), np.ones_like(pp), pp - 1
    runs_over = model.moe is not None and model.dense_layers > 1
    inner = [(one, np.where(pp > 3, 1, pp > 2) if runs_over else np.maximum(pp - 2, 0))]
    inner += [(2 * one, np.maximum(pp - 3, 0))] if runs_over else []
    return (
        _stage(model, layouts, zero, one, whole - first_short, one, alone | folded),
        *(_stage(model, layouts, rank, count, whole, zero, zero) for rank, count in inner),
        _stage(model, layouts, last, np.where(alone, 0, 1), whole - last_short, zero, ~folded),
    )


def stage_of(model: ModelSpec, layouts: Layouts, rank: int) -> Stage:
    """Any one pipeline rank, standing for itself alone; it does not exist where pp <= rank."""
    pp, at = layouts.pp, np.full_like(layouts.pp, rank)
    holds_last = np.where((pp == 1) | (layouts.schedule == ZB_V), rank == 0, at == pp - 1)
    short = np.where(at == 0, layouts.short_first, 0) + np.where(holds_last, layouts.short_last, 0)
    layers = layers_per_virtual_stage(model, layouts) * layouts.vpp - short
    return _stage(model, layouts, at, np.where(at < pp, 1, 0), layers, at == 0, holds_last)


def layers_per_virtual_stage(model: ModelSpec, layouts: Layouts) -> Column:
    """Layers of a virtual stage that is not short."""
    return (model.n_layers + layouts.short_first + layouts.short_last) / (layouts.pp * layouts.vpp)


def _stage(
    model: ModelSpec, layouts: Layouts, rank: Column, count: Column, layers: Column, embedding: Column, head: Column
) -> Stage:
    dense = np.minimum(_dense_on(model, layouts, rank), layers) if model.moe else layers
    return Stage(
        exists=np.asarray(count) > 0,
        count=count,
        rank=rank,
        dense_layers=np.asarray(dense, dtype=float),
        moe_layers=np.asarray(layers - dense, dtype=float),
        has_embedding=np.asarray(embedding, dtype=float),
        has_head=np.asarray(head, dtype=float),
    )


def _dense_on(model: ModelSpec, layouts: Layouts, rank: Column) -> Column:
    """Leading dense layers on a rank: those of its virtual stages that they fill, and the one that they end in."""
    if not model.dense_layers:
        return np.zeros_like(rank)
    pp, each = layouts.pp, layers_per_virtual_stage(model, layouts)
    places = model.dense_layers + layouts.short_first
    full, left = places // each, places % each
    folds, back = layouts.schedule == ZB_V, 2 * pp - 1
    filled = np.where(folds, (rank < full) * 1 + (back - rank < full), (full - rank + pp - 1) // pp)
    ends_on = np.where(folds & (full >= pp), back - full, full % pp)
    missing = np.where(rank == 0, layouts.short_first, 0)
    return filled * each + np.where(ends_on == rank, left, 0) - missing


def _attention(model: ModelSpec, tp: Column) -> Column:
    """Heads are cut by tp. Output bias, query/key norms and MLA's down projections are whole on every rank."""
    whole = model.hidden_dim * model.attention_out_bias + 2.0 * model.head_dim * model.qk_norm
    if model.mla:
        mla = model.mla
        latent = mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim
        whole = model.hidden_dim * latent + mla.q_lora_rank + mla.kv_lora_rank + model.qkv_bias * latent
        whole += model.hidden_dim * model.attention_out_bias
    return whole + (model.attention_params - whole) / tp


def _mlp(model: ModelSpec, ffn_dim: int, tp: Column) -> Column:
    """Gate, up and down are cut by tp; the down projection's bias is whole on every rank."""
    if not ffn_dim:
        return np.asarray(0.0)
    projections = 3 if model.gated_mlp else 2
    bias = (projections - 1) * ffn_dim / tp + model.hidden_dim if model.mlp_bias else 0.0
    return projections * model.hidden_dim * float(ffn_dim) / tp + bias


def _experts(model: ModelSpec, layouts: Layouts, tp: Column) -> Column:
    if not model.moe:
        return np.zeros_like(tp)
    every = float(model.moe.experts * model.expert_params)
    return np.where(layouts.ep > 1, every / layouts.ep, every / tp)


def shard_degree(layouts: Layouts) -> Column:
    """Ranks over which ZeRO shards dense parameters: dp_shard x cp, since cp ranks hold the same weights; 1 for ZeRO-0.

    As torchtitan's FSDP mesh does (docs: parallel dims, `dp_shard_cp`).
    """
    return np.where(layouts.zero > 0, layouts.dp_shard * layouts.cp, 1)


def expert_shard_degree(layouts: Layouts) -> Column:
    """The same for routed experts: the ranks of dp_shard x cp x tp that hold the same experts."""
    spread = np.maximum(layouts.dp_shard * layouts.cp * layouts.tp // np.maximum(layouts.ep, 1), 1)
    return np.where(layouts.zero > 0, np.where(layouts.ep > 1, spread, layouts.dp_shard * layouts.cp), 1)
