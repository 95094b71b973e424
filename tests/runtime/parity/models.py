"""Small models that differ from `tiny` in one part of the architecture each."""

from __future__ import annotations

from typing import Any, Final

_BIASES = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}
_PLAIN_BLOCK = {"norm": "layernorm", "gated_mlp": False, **_BIASES}
_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_EXPERTS = {"experts": 4, "top_k": 2, "ffn_dim": 64}


def _tiny(**changes: object) -> dict[str, Any]:
    return {"name": "tiny", **changes}


def _sparse(**changes: object) -> dict[str, Any]:
    return {"name": "tiny-moe", "moe": _EXPERTS | changes}


MODELS: Final[dict[str, dict[str, Any]]] = {
    "tiny": _tiny(),
    "tiny-moe": {"name": "tiny-moe"},
    "deep": _tiny(n_layers=8, hidden_dim=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=128),
    "six": _tiny(n_layers=6),
    "mqa": _tiny(n_kv_heads=1),
    "mha": _tiny(n_kv_heads=8),
    "tied": _tiny(tied_embeddings=True),
    "odd-vocabulary": _tiny(vocab_size=509),
    "gpt2": _tiny(n_kv_heads=8, position="learned", positions=80, tied_embeddings=True, **_PLAIN_BLOCK),
    "bloom": _tiny(n_kv_heads=8, position="alibi", embedding_norm=True, tied_embeddings=True, **_PLAIN_BLOCK),
    "alibi-window": _tiny(position="alibi", sliding_window=24),
    "qk-norm": _tiny(qk_norm=True, head_dim=32),
    "window": _tiny(sliding_window=24),
    "biases": _tiny(**_BIASES),
    "mla": _tiny(mla={"q_lora_rank": 0, **_LATENT}),
    "mla-q": _tiny(mla={"q_lora_rank": 48, **_LATENT, "v_head_dim": 24}),
    "moe-shared": _sparse(shared_ffn_dim=64),
    "moe-gate": _sparse(shared_ffn_dim=64, shared_gate=True),
    "moe-dense": _sparse(dense_layers=1),
    "moe-bias": _sparse(router_bias=True),
    "moe-deepseek": {
        **_sparse(experts=8, shared_ffn_dim=64, dense_layers=1, router_bias=True),
        "mla": {"q_lora_rank": 48, **_LATENT},
    },
    "moe-plain": {**_sparse(), "gated_mlp": False},
}
