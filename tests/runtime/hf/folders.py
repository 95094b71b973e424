"""Tiny models in Hugging Face's form, written by hand from transformers' classes, with weights from a fixed stream.

Nothing of the trainer is used, so that names, shapes and config keys are a second opinion.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

BATCH, SEQ_LEN = 4, 32

_BASE: Final[dict[str, Any]] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
_QWEN_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def _config(kind: str, architecture: str, **changes: object) -> dict[str, Any]:
    return {**_BASE, "model_type": kind, "architectures": [f"{architecture}ForCausalLM"], **changes}


CONFIGS: Final[dict[str, dict[str, Any]]] = {
    # A large epsilon, a small base: both must come from the config for the loss to agree.
    "llama": _config("llama", "Llama", rms_norm_eps=0.01, rope_theta=100.0),
    "llama-biases": _config(
        "llama", "Llama", attention_bias=True, mlp_bias=True, head_dim=32, tie_word_embeddings=True
    ),
    "mistral": _config("mistral", "Mistral", sliding_window=8, num_key_value_heads=4),
    "qwen2": _config("qwen2", "Qwen2", tie_word_embeddings=True, rope_theta=1e6, use_sliding_window=False),
    "qwen2-window": _config("qwen2", "Qwen2", use_sliding_window=True, max_window_layers=0, sliding_window=8),
    "qwen3": _config("qwen3", "Qwen3", head_dim=32, rope_theta=1e6),
    "mixtral": _config(
        "mixtral", "Mixtral", intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen2-moe": _config(
        "qwen2_moe", "Qwen2Moe", **_QWEN_EXPERTS, shared_expert_intermediate_size=80, use_sliding_window=False
    ),
    "qwen3-moe": _config("qwen3_moe", "Qwen3Moe", **{**_QWEN_EXPERTS, "mlp_only_layers": [0]}, head_dim=16),
}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """All tensors of a checkpoint on the Hub."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        inside = [*_attention(config), *_mlp(config, layer)]
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inside}
    return shapes


def _attention(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    kind, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim", hidden // heads)
    query, key = heads * width, config["num_key_value_heads"] * width
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "self_attn.q_proj.weight", (query, hidden)
    yield "self_attn.k_proj.weight", (key, hidden)
    yield "self_attn.v_proj.weight", (key, hidden)
    yield "self_attn.o_proj.weight", (hidden, query)
    if kind in {"qwen2", "qwen2_moe"} or config.get("attention_bias"):
        yield "self_attn.q_proj.bias", (query,)
        yield "self_attn.k_proj.bias", (key,)
        yield "self_attn.v_proj.bias", (key,)
    if config.get("attention_bias"):
        yield "self_attn.o_proj.bias", (hidden,)
    if kind in {"qwen3", "qwen3_moe"}:
        yield "self_attn.q_norm.weight", (width,)
        yield "self_attn.k_norm.weight", (width,)


def _mlp(config: dict[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    kind, hidden = config["model_type"], config["hidden_size"]
    if kind == "mixtral":
        yield "block_sparse_moe.gate.weight", (4, hidden)
        for expert in range(4):
            yield f"block_sparse_moe.experts.{expert}.w1.weight", (48, hidden)
            yield f"block_sparse_moe.experts.{expert}.w2.weight", (hidden, 48)
            yield f"block_sparse_moe.experts.{expert}.w3.weight", (48, hidden)
    elif kind in {"qwen2_moe", "qwen3_moe"} and layer not in config["mlp_only_layers"]:
        yield "mlp.gate.weight", (4, hidden)
        for expert in range(4):
            yield from _gated(f"mlp.experts.{expert}", hidden, 48)
        if kind == "qwen2_moe":
            yield from _gated("mlp.shared_expert", hidden, 80)
            yield "mlp.shared_expert_gate.weight", (1, hidden)
    else:
        yield from _gated("mlp", hidden, config["intermediate_size"], biased=config.get("mlp_bias", False))


def _gated(name: str, hidden: int, width: int, *, biased: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part, shape in (("gate_proj", (width, hidden)), ("up_proj", (width, hidden)), ("down_proj", (hidden, width))):
        yield f"{name}.{part}.weight", shape
        if biased:
            yield f"{name}.{part}.bias", shape[:1]


def weights_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Values from a stream of their own for each name: norms near 1, everything else around 0."""
    found = {}
    for name, shape in shapes_of(config).items():
        values = np.random.default_rng(zlib.crc32(name.encode())).normal(0.0, 0.1, shape)
        found[name] = (values + ("norm" in name)).astype(np.float32)
    return found


def write_folder(folder: Path, name: str, files: int = 1) -> Path:
    """A folder as downloaded from the Hub, in one file or in several with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    weights = weights_of(CONFIGS[name])
    if files == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    placed = {key: f"model-{1 + place % files:05d}-of-{files:05d}.safetensors" for place, key in enumerate(weights)}
    for file in set(placed.values()):
        save_file({k: w for k, w in weights.items() if placed[k] == file}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def sequences(config: dict[str, Any]) -> np.ndarray:
    """Random tokens, (batch, seq_len + 1)."""
    return np.random.default_rng(7).integers(0, config["vocab_size"], (BATCH, SEQ_LEN + 1))
