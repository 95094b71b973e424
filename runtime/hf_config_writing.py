"""The config.json with which transformers computes what our decoder computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cost_models.model import ModelSpec, MoeSpec

    from .hf_names import HfFamily


def hf_config(model: ModelSpec, family: HfFamily, *, seq_len: int, dtype: str) -> dict[str, Any]:
    """Content of the file.

    Args:
        seq_len: longest sequence that was trained.
        dtype: of the weights, as torch names it.
    """
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": seq_len,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": "silu",
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": dtype,
    }
    return values | _biases(model, family) | _window(model, family) | _experts(model, family)


def _biases(model: ModelSpec, family: HfFamily) -> dict[str, Any]:
    if family.model_type == "llama":
        return {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}
    if family.model_type in {"qwen3", "qwen3_moe"}:
        return {"attention_bias": model.qkv_bias}
    return {"qkv_bias": model.qkv_bias} if family.model_type == "qwen2_moe" else {}


def _window(model: ModelSpec, family: HfFamily) -> dict[str, Any]:
    """Qwen's starts at a layer and is off by default; the others' is on where it is given."""
    window = model.sliding_window
    if family.model_type.startswith("qwen"):
        used = {"sliding_window": window, "max_window_layers": 0} if window else {}
        return {"use_sliding_window": bool(window), **used}
    return {"sliding_window": window or None} if family.model_type in {"mistral", "mixtral"} else {}


def _experts(model: ModelSpec, family: HfFamily) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {}
    if family.experts == "mixtral":
        return {
            "intermediate_size": moe.ffn_dim,
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "output_router_logits": False,
        }
    return _qwen_experts(moe)


def _qwen_experts(moe: MoeSpec) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": moe.shared_ffn_dim} if moe.shared_ffn_dim else {}
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_dim,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(moe.dense_layers)),
        "norm_topk_prob": True,
        "output_router_logits": False,
        **shared,
    }
