"""Parameter counts against published numbers and against tensors written out by hand; FLOPs against the literature."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.catalog import find_model, list_models
from cost_models.errors import TitanPlanError
from cost_models.model import MlaSpec, ModelSpec, MoeSpec
from cost_models.model_files import ModelEntry

PUBLISHED = [entry for entry in list_models() if entry.published_parameters is not None]
Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes as in the state dict of the Hugging Face model."""


@pytest.mark.parametrize("entry", PUBLISHED, ids=lambda entry: entry.name)
def test_parameters_equal_the_published_number_to_the_digit(entry: ModelEntry) -> None:
    assert entry.spec.total_params == entry.published_parameters


def test_all_but_the_unpublished_models_have_an_exact_number() -> None:
    without = {entry.name for entry in list_models() if entry.published_parameters is None}
    assert without == {"gpt3-175b", "pangu-ultra-135b", "tiny", "tiny-moe"}


@pytest.mark.parametrize(("name", "published"), [("gpt3-175b", 174.6e9), ("pangu-ultra-135b", 135e9)])
def test_models_with_rounded_numbers_only_are_within_a_percent(name: str, published: float) -> None:
    assert find_model(name).total_params == pytest.approx(published, rel=0.01)


def linear(name: str, n_in: int, n_out: int, bias: bool = False) -> Shapes:
    yield f"{name}.weight", (n_out, n_in)
    if bias:
        yield f"{name}.bias", (n_out,)


def gated_mlp(name: str, hidden: int, ffn: int) -> Shapes:
    yield from linear(f"{name}.gate_proj", hidden, ffn)
    yield from linear(f"{name}.up_proj", hidden, ffn)
    yield from linear(f"{name}.down_proj", ffn, hidden)


def grouped_attention(m: ModelSpec) -> Shapes:
    width, kv_width = m.n_heads * m.head_dim, m.n_kv_heads * m.head_dim
    yield from linear("self_attn.q_proj", m.hidden_dim, width, m.qkv_bias)
    yield from linear("self_attn.k_proj", m.hidden_dim, kv_width, m.qkv_bias)
    yield from linear("self_attn.v_proj", m.hidden_dim, kv_width, m.qkv_bias)
    yield from linear("self_attn.o_proj", width, m.hidden_dim)
    if m.qk_norm:
        yield "self_attn.q_norm.weight", (m.head_dim,)
        yield "self_attn.k_norm.weight", (m.head_dim,)


def latent_attention(m: ModelSpec, mla: MlaSpec) -> Shapes:
    heads = m.n_heads
    head = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if mla.q_lora_rank:
        yield from linear("self_attn.q_a_proj", m.hidden_dim, mla.q_lora_rank)
        yield "self_attn.q_a_layernorm.weight", (mla.q_lora_rank,)
        yield from linear("self_attn.q_b_proj", mla.q_lora_rank, heads * head)
    else:
        yield from linear("self_attn.q_proj", m.hidden_dim, heads * head)
    yield from linear("self_attn.kv_a_proj_with_mqa", m.hidden_dim, mla.kv_lora_rank + mla.qk_rope_head_dim)
    yield "self_attn.kv_a_layernorm.weight", (mla.kv_lora_rank,)
    yield from linear("self_attn.kv_b_proj", mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim))
    yield from linear("self_attn.o_proj", heads * mla.v_head_dim, m.hidden_dim)


def expert_mlps(hidden: int, moe: MoeSpec) -> Shapes:
    yield from linear("mlp.gate", hidden, moe.experts)
    if moe.router_bias:
        yield "mlp.gate.e_score_correction_bias", (moe.experts,)
    for expert in range(moe.experts):
        yield from gated_mlp(f"mlp.experts.{expert}", hidden, moe.ffn_dim)
    if moe.shared_ffn_dim:
        yield from gated_mlp("mlp.shared_experts", hidden, moe.shared_ffn_dim)


def llama_like(m: ModelSpec) -> Shapes:
    """Llama, Mistral, Mixtral, Qwen and DeepSeek."""
    yield "model.embed_tokens.weight", (m.vocab_size, m.hidden_dim)
    for layer in range(m.n_layers):
        yield f"layers.{layer}.input_layernorm.weight", (m.hidden_dim,)
        yield from latent_attention(m, m.mla) if m.mla else grouped_attention(m)
        yield f"layers.{layer}.post_attention_layernorm.weight", (m.hidden_dim,)
        if m.moe is None or layer < m.moe.dense_layers:
            yield from gated_mlp("mlp", m.hidden_dim, m.ffn_dim)
        else:
            yield from expert_mlps(m.hidden_dim, m.moe)
    yield "model.norm.weight", (m.hidden_dim,)
    if not m.tied_embeddings:
        yield "lm_head.weight", (m.vocab_size, m.hidden_dim)


def gpt_like(m: ModelSpec) -> Shapes:
    """GPT-2, GPT-3 and BLOOM: fused query, key and value, plain MLP, layer norms with bias."""
    h = m.hidden_dim
    yield "wte", (m.vocab_size, h)
    if m.position == "learned":
        yield "wpe", (m.positions, h)
    if m.embedding_norm:
        yield from (("word_embeddings_layernorm.weight", (h,)), ("word_embeddings_layernorm.bias", (h,)))
    for layer in range(m.n_layers):
        for norm in ("ln_1", "ln_2"):
            yield from ((f"h.{layer}.{norm}.weight", (h,)), (f"h.{layer}.{norm}.bias", (h,)))
        yield from linear("attn.c_attn", h, 3 * h, bias=True)
        yield from linear("attn.c_proj", h, h, bias=True)
        yield from linear("mlp.c_fc", h, 4 * h, bias=True)
        yield from linear("mlp.c_proj", 4 * h, h, bias=True)
    yield from (("ln_f.weight", (h,)), ("ln_f.bias", (h,)))


@pytest.mark.parametrize("entry", list_models(), ids=lambda entry: entry.name)
def test_parameters_equal_the_sum_over_tensors_written_by_hand(entry: ModelEntry) -> None:
    shapes = llama_like(entry.spec) if entry.spec.gated_mlp else gpt_like(entry.spec)
    assert sum(prod(shape) for _, shape in shapes) == entry.spec.total_params


@pytest.mark.parametrize(
    ("name", "published_billions"),
    [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39), ("qwen3-235b-a22b", 22), ("qwen3-30b-a3b", 3.3)],
)
def test_active_parameters_round_to_the_published_ones(name: str, published_billions: float) -> None:
    assert find_model(name).active_params / 1e9 == pytest.approx(published_billions, rel=0.02)


@pytest.mark.parametrize(("name", "published_billions"), [("deepseek-v3", 37), ("deepseek-v2", 21)])
def test_active_parameters_of_deepseek_count_no_embedding_look_up(name: str, published_billions: float) -> None:
    spec = find_model(name)
    assert round((spec.active_params - spec.embedding_params) / 1e9) == published_billions


def test_active_parameters_of_a_dense_model_are_all_of_them() -> None:
    assert find_model("70B").active_params == find_model("70B").total_params


@pytest.mark.parametrize("name", ["gpt3-175b", "gpt2-1.5b"])
@pytest.mark.parametrize("vocab_size", [50257, 51200])
def test_flops_equal_narayanan_2021(name: str, vocab_size: int) -> None:
    """SC'21, arXiv:2104.04473, equation 3: 96 B s l h^2 (1 + s/6h + V/16lh).

    It counts attention in full and four forward units a layer (forward, recompute, twice backward), three for the
    head. Ours counts the causal half, so the other half of attention is added.
    """
    m = replace(find_model(name), vocab_size=vocab_size)
    s, h, layers = m.seq_len, m.hidden_dim, m.n_layers
    head = 2 * s * h * vocab_size
    masked_half = 2 * layers * s * s * h
    layer_part = m.forward_flops_per_sequence(s) - head + masked_half
    narayanan = 96 * s * layers * h**2 * (1 + s / (6 * h) + vocab_size / (16 * layers * h))
    assert 4 * layer_part + 3 * head == pytest.approx(narayanan, rel=1e-12)


def test_gemm_flops_of_a_token_are_twice_the_weights_that_it_meets() -> None:
    m = find_model("llama2-70b")
    norms = (2 * m.n_layers + 1) * m.hidden_dim
    assert m.matmul_params_per_token() == m.total_params - m.embedding_params - norms


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2"])
def test_gemms_of_a_sparse_model_are_its_active_weights(name: str) -> None:
    m = find_model(name)
    norms = m.hidden_dim * (2 * m.n_layers + 1)
    inner = m.mla.q_lora_rank + m.mla.kv_lora_rank if m.mla else 2 * m.head_dim * m.qk_norm
    expected = m.active_params - m.embedding_params - norms - m.n_layers * inner
    assert m.matmul_params_per_token() == expected


def test_mla_attention_flops_use_its_own_head_sizes() -> None:
    m = find_model("deepseek-v3")
    attention = m.forward_flops_per_sequence(4096) - 2 * m.matmul_params_per_token() * 4096
    assert attention == 61 * 128 * (128 + 64 + 128) * 4096**2


def test_a_sliding_window_limits_attention_to_a_band() -> None:
    m = find_model("mistral-7b")
    assert m.attended_pairs(4096) == 4096**2 / 2
    assert m.attended_pairs(32768) == 4096 * 32768 - 4096**2 / 2


@given(seq_len=st.integers(1, 10**6), window=st.integers(0, 10**6))
def test_a_window_never_adds_pairs(seq_len: int, window: int) -> None:
    m = replace(find_model("tiny"), sliding_window=window)
    assert 0 < m.attended_pairs(seq_len) <= seq_len * seq_len / 2


@given(window=st.integers(1, 10**4), extra=st.integers(0, 10**4))
def test_a_window_counts_what_the_mask_lets_through(window: int, extra: int) -> None:
    """The exact count is sum(min(i, window)); ours is its continuous form, half a pair a query less."""
    seq_len = window + extra
    exact = window * (window + 1) // 2 + extra * window
    m = replace(find_model("tiny"), sliding_window=window)
    assert exact - m.attended_pairs(seq_len) == pytest.approx(window / 2)


LATENTS: Final = MlaSpec(q_lora_rank=0, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
SIZES: Final[dict[str, Any]] = {
    "name": "m",
    "hidden_dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 96,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"hidden_dim": 0}, "hidden_dim"),
        ({"n_layers": True}, "n_layers"),
        ({"ffn_dim": 1.5}, "ffn_dim"),
        ({"n_kv_heads": 3}, "multiple"),
        *(({"head_dim": odd}, f"head_dim is {odd}, and position is rope") for odd in (1, 17)),
        ({"mla": replace(LATENTS, qk_rope_head_dim=7)}, r"mla\.qk_rope_head_dim is 7"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"positions": -1}, "positions"),
        ({"position": "learned"}, "learned"),
        ({"n_layers": 10_001}, r"n_layers is 10001, above the bound of 10,000"),
        *(({key: 10**7 + 1}, f"{key} .* 10,000,000") for key in ("hidden_dim", "ffn_dim", "n_heads", "head_dim")),
        ({"vocab_size": 10**9 + 1}, "1,000,000,000"),
        *(({key: 10**8 + 1}, f"{key} .* 100,000,000") for key in ("seq_len", "positions", "sliding_window")),
        ({"hidden_dim": 10**5000}, "hidden_dim"),
        ({"name": "a\x1b[31mred"}, "control"),
        ({"name": "two\nlines"}, "control"),
        ({"name": "x" * 201}, "201 characters"),
        ({"moe": MoeSpec(experts=4, top_k=2, ffn_dim=8, dense_layers=3)}, "dense_layers"),
    ],
)
def test_impossible_models_are_refused(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(TitanPlanError, match=word) as caught:
        ModelSpec(**{**SIZES, **wrong})
    assert caught.value.code == "C610"
    assert caught.value.hint


def test_impossible_experts_and_latents_are_refused() -> None:
    with pytest.raises(TitanPlanError, match="top_k is 5"):
        MoeSpec(experts=4, top_k=5, ffn_dim=8)
    with pytest.raises(TitanPlanError, match="shared_ffn_dim"):
        MoeSpec(experts=4, top_k=2, ffn_dim=8, shared_ffn_dim=-8)
    with pytest.raises(TitanPlanError, match="q_lora_rank"):
        MlaSpec(q_lora_rank=-1, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    with pytest.raises(TitanPlanError, match="experts is 10000001"):
        MoeSpec(experts=10**7 + 1, top_k=2, ffn_dim=8)
    with pytest.raises(TitanPlanError, match=r"kv_lora_rank .* 10,000,000"):
        MlaSpec(q_lora_rank=0, kv_lora_rank=10**9, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)


def test_heads_of_an_odd_width_are_fine_where_nothing_is_rotated() -> None:
    assert ModelSpec(**{**SIZES, "head_dim": 17, "position": "learned", "positions": 64}).head_dim == 17


@pytest.mark.parametrize("name", ["盘古-7B", "<script>alert(1)</script>", "é ü", "x" * 200, "🚀"])
def test_any_printable_name_is_fine(name: str) -> None:
    assert ModelSpec(**{**SIZES, "name": name}).name == name
