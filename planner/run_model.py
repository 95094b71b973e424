"""The architecture that one row of a run table names, by its numbers and, where they agree, by the catalogue.

What a row leaves open is taken, in this order, from
1. a model of the catalogue that its `model` names (or, for experts, that has the same numbers) and that contradicts no
   number of the row but layers and vocabulary (published runs shorten models); it brings MLA, shared experts, biases;
2. the launch options in `other_flags` (Megatron's and MindSpeed's names);
3. defaults: kv_heads = heads; head_dim = hidden / heads; gated_mlp where ffn is given and is not 4 x hidden;
   ffn = 4 x hidden, or for a gated MLP 8/3 x hidden rounded up to 256 (LLaMA); moe_ffn = ffn; vocab 32000 where the
   MLP is gated (LLaMA), else 50257 (GPT-2). A plain MLP comes with layer norm, learned positions, biases and tied
   embeddings (GPT-2, GPT-3), a gated one with RMSNorm, rotary positions, no biases and an own head (LLaMA).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from cost_models.catalog import find_model, list_models
from cost_models.errors import TitanPlanError
from cost_models.model import MlaSpec, ModelSpec, MoeSpec, Norm, Position

from .run_cells import IncompleteRunError, missing

if TYPE_CHECKING:
    from .run_cells import Cells

_GPT_VOCAB, _LLAMA_VOCAB = 50257, 32000
_FFN_MULTIPLE = 256


def model_of(cells: Cells, seq_len: int) -> ModelSpec:
    """The ModelSpec of a row; IncompleteRunError names the column that is missing or contradicts another."""
    known = _agreeing_model(cells)
    try:
        return _adapted(known, cells, seq_len) if known else _spelled_out(cells, seq_len)
    except TitanPlanError as error:
        raise IncompleteRunError("dimensions of the model do not fit", f"{error.message}; {error.hint}") from error


def _agreeing_model(cells: Cells) -> ModelSpec | None:
    named = _named_model(cells.text("model"))
    if named and _agrees(named, cells):
        return named
    columns = ("hidden", "heads", "moe_experts", "moe_topk", "moe_ffn")
    if not all(map(cells.text, columns)):
        return None
    return next((entry.spec for entry in list_models() if entry.spec.moe and _agrees(entry.spec, cells)), None)


@lru_cache(maxsize=1024)
def _named_model(name: str) -> ModelSpec | None:
    """A catalogue model by name, remarks left out: `llama3-70b (12 layers)`, `DeepSeekV3 w/ MTP`."""
    if name:
        try:
            return find_model(name)  # a path may hold blanks and brackets
        except TitanPlanError:
            pass
    words = name.partition("(")[0].split()
    while words:
        try:
            return find_model(" ".join(words))
        except TitanPlanError:
            if any(character.isdigit() for character in words[-1]):
                return None
            words.pop()
    return None


def _agrees(spec: ModelSpec, cells: Cells) -> bool:
    """Whether no number of the row contradicts the model; MLA has key/value heads of its own kind."""
    moe = spec.moe
    same = {"hidden": {spec.hidden_dim}, "heads": {spec.n_heads}, "head_dim": {spec.head_dim}, "ffn": {spec.ffn_dim}}
    if not spec.mla:
        same["kv_heads"] = {spec.n_kv_heads}
    same["moe_experts"] = {moe.experts} if moe else {0}
    same["moe_topk"] = {moe.top_k} if moe else {0}
    same["moe_ffn"] = {moe.ffn_dim} if moe else {0}
    if moe:
        same["ffn"].add(moe.ffn_dim)
    given = {column: cells.whole(column, at_least=0) for column in same}
    return all(value is None or value in same[column] for column, value in given.items())


def _adapted(known: ModelSpec, cells: Cells, seq_len: int) -> ModelSpec:
    """A catalogue model with the layers and vocabulary of the row."""
    layers = cells.whole("layers") or known.n_layers
    gated, tied = cells.flag("gated_mlp"), cells.flag("tied_embeddings")
    moe = known.moe
    return replace(
        known,
        name=cells.text("model"),
        n_layers=layers,
        vocab_size=cells.whole("vocab") or known.vocab_size,
        gated_mlp=known.gated_mlp if gated is None else gated,
        tied_embeddings=known.tied_embeddings if tied is None else tied,
        positions=max(known.positions, seq_len) if known.position == "learned" else known.positions,
        moe=replace(moe, dense_layers=min(moe.dense_layers, layers)) if moe else None,
    )


def _spelled_out(cells: Cells, seq_len: int) -> ModelSpec:
    """A model by the numbers of the row alone."""
    hidden, layers, heads = (_dimension(cells, column) for column in ("hidden", "layers", "heads"))
    ffn = cells.whole("ffn")
    gated = _is_gated(cells, hidden, ffn)
    ffn = ffn or (_llama_ffn(hidden) if gated else 4 * hidden)
    position = _position(cells, gated=gated)
    tied = cells.flag("tied_embeddings")
    bias = not gated and "disable-bias-linear" not in cells.options
    return ModelSpec(
        name=cells.text("model") or "unnamed",
        hidden_dim=hidden,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=cells.whole("kv_heads") or heads,
        head_dim=_head_dim(cells, hidden, heads),
        ffn_dim=ffn,
        vocab_size=cells.whole("vocab") or (_LLAMA_VOCAB if gated else _GPT_VOCAB),
        gated_mlp=gated,
        norm=_norm(cells, gated=gated),
        position=position,
        positions=seq_len if position == "learned" else 0,
        qkv_bias=bias or "add-qkv-bias" in cells.options,
        attention_out_bias=bias,
        mlp_bias=bias,
        tied_embeddings=_ties(cells, gated=gated) if tied is None else tied,
        moe=_moe(cells, ffn, layers),
        mla=_mla(cells),
    )


def _dimension(cells: Cells, column: str) -> int:
    value = cells.whole(column)
    if value is None:
        name = cells.text("model")
        raise missing(column, f"and model {name[:60]!r} is not one of the catalogue" if name else "")
    return value


def _is_gated(cells: Cells, hidden: int, ffn: int | None) -> bool:
    given = cells.flag("gated_mlp")
    if given is not None:
        return given
    return (ffn is not None and ffn != 4 * hidden) or bool({"swiglu", "use-fused-swiglu"} & cells.options.keys())


def _llama_ffn(hidden: int) -> int:
    return math.ceil(8 * hidden / 3 / _FFN_MULTIPLE) * _FFN_MULTIPLE


def _head_dim(cells: Cells, hidden: int, heads: int) -> int:
    given = cells.whole("head_dim") or cells.option_count("kv-channels")
    if not given and hidden % heads:
        reason = f"hidden {hidden} does not split over heads {heads}; give head_dim, or a multiple"
        raise IncompleteRunError("dimensions of the model do not fit", reason)
    return given or hidden // heads


def _norm(cells: Cells, *, gated: bool) -> Norm:
    said = cells.options.get("normalization", "").lower()
    return "rmsnorm" if said == "rmsnorm" or (gated and said != "layernorm") else "layernorm"


def _position(cells: Cells, *, gated: bool) -> Position:
    said = cells.options.get("position-embedding-type", "").lower()
    if said == "alibi":
        return "alibi"
    return "rope" if (said or gated) and not said.startswith("learned") else "learned"


def _ties(cells: Cells, *, gated: bool) -> bool:
    return not gated and "untie-embeddings-and-output-weights" not in cells.options


def _moe(cells: Cells, ffn: int, layers: int) -> MoeSpec | None:
    experts = cells.whole("moe_experts", at_least=0)
    if not experts:
        return None
    width = cells.whole("moe_ffn") or ffn
    shared = cells.option_count("moe-shared-expert-intermediate-size")
    leading = re.match(r"\(\[0\]\*([0-9]{1,4})", cells.options.get("moe-layer-freq", ""))
    dense = cells.option_count("first-k-dense-replace") or (int(leading[1]) if leading else 0)
    return MoeSpec(
        experts=experts,
        top_k=cells.need("moe_topk"),
        ffn_dim=width,
        shared_ffn_dim=shared or cells.option_count("n-shared-experts") * width,
        dense_layers=min(dense, layers),
    )


def _mla(cells: Cells) -> MlaSpec | None:
    if not cells.option_count("kv-lora-rank"):
        return None
    return MlaSpec(
        q_lora_rank=cells.option_count("q-lora-rank"),
        kv_lora_rank=cells.option_count("kv-lora-rank"),
        qk_nope_head_dim=cells.option_count("qk-head-dim") or 128,
        qk_rope_head_dim=cells.option_count("qk-pos-emb-head-dim") or 64,
        v_head_dim=cells.option_count("v-head-dim") or 128,
    )
