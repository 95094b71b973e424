"""Hugging Face `config.json` to ModelSpec, for the architectures whose parameter counts were checked.

What a config leaves out gets the default of its class in transformers. Read for shapes only: a multi-token-prediction
module (DeepSeek-V3) is not counted, quantisation is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from cost_models.errors import TitanPlanError
from cost_models.hf_values import HfValues, rope_scaling
from cost_models.model import MlaSpec, ModelSpec, MoeSpec
from cost_models.model_files import show
from cost_models.yaml_files import read_text

_ROPE_THETA: Final = 10000.0
_MIXTRAL_ROPE_THETA: Final = 1e6


def load_hf_config(path: Path) -> ModelSpec:
    """Read a model from a `config.json`, or from the folder that holds one."""
    if path.is_dir():
        path = path / "config.json"
    text = read_text(path)
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise TitanPlanError("C604", f"{path}:{error.lineno}:{error.colno}: {error.msg}", "mend the JSON") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise TitanPlanError("C604", f"{path}: {error}", "mend the JSON") from None
    return parse_hf_config(values, str(path))


def hf_notes(values: Mapping[str, object]) -> tuple[str, ...]:
    """What a config.json asks for that our trainer does not do, in words for the log; sizes are the same without it.

    Args:
        values: content of the `config.json`.
    """
    scaling = rope_scaling(values)
    if scaling is None:
        return ()
    kind = scaling.get("rope_type", scaling.get("type"))
    return (
        f"rope_scaling {kind} is left out: angles of rope_theta alone are trained, so that outputs differ from those "
        "of transformers for this folder",
    )


def parse_hf_config(values: object, origin: str) -> ModelSpec:
    """Build the ModelSpec of a Hugging Face config.

    Args:
        values: content of the `config.json`.
        origin: the file, as complaints should name it; its folder names a model whose config does not.
    """
    if not isinstance(values, Mapping):
        raise TitanPlanError("C606", f"{origin}: a config.json is a JSON object, got {show(values)}", "check the file")
    config = HfValues(values, origin)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        got = f"model_type {kind!r} is not supported" if kind else "there is no model_type"
        hint = f"supported: {', '.join(_ARCHITECTURES)}; for others write a model file (YAML) and pass its path"
        raise TitanPlanError("C607", f"{origin}: {got}", hint)
    try:
        return _ARCHITECTURES[kind](config)
    except TitanPlanError as error:
        message = error.message if error.message.startswith(origin) else f"{origin}: {error.message}"
        raise TitanPlanError(error.code, message, error.hint) from None


def _head_dim(config: HfValues, hidden: int, heads: int) -> int:
    """Width of a head where the config does not give it."""
    if heads < 1 or hidden % heads:
        message = f"{config.origin}: hidden_size {hidden} / num_attention_heads {heads} is no whole number"
        raise TitanPlanError("C608", message, "give head_dim")
    return hidden // heads


def _gated(config: HfValues, head_dim: int = 0, *, theta: float = _ROPE_THETA, epsilon: float = 1e-6) -> ModelSpec:
    """The common part: RMSNorm, rotary positions, a gated MLP, no biases."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    return ModelSpec(
        name=config.name,
        hidden_dim=hidden,
        n_layers=config.whole("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=config.whole("num_key_value_heads", default=heads),
        head_dim=config.whole("head_dim", default=0) or head_dim or _head_dim(config, hidden, heads),
        ffn_dim=config.whole("intermediate_size"),
        vocab_size=config.whole("vocab_size"),
        seq_len=config.seq_len,
        tied_embeddings=config.flag("tie_word_embeddings"),
        rope_theta=config.rope_theta(theta),
        norm_epsilon=config.real("rms_norm_eps", default=epsilon),
    )


def _llama(config: HfValues) -> ModelSpec:
    attention, mlp = config.flag("attention_bias"), config.flag("mlp_bias")
    return replace(_gated(config), qkv_bias=attention, attention_out_bias=attention, mlp_bias=mlp)


def _internlm2(config: HfValues) -> ModelSpec:
    bias = config.flag("bias")
    return replace(_gated(config), qkv_bias=bias, attention_out_bias=bias)


def _mistral(config: HfValues) -> ModelSpec:
    # MistralConfig: 4096 where the key is missing, no window where it is null.
    window = config.whole("sliding_window", default=0) if "sliding_window" in config.values else 4096
    return replace(_gated(config), sliding_window=window)


def _mixtral(config: HfValues) -> ModelSpec:
    moe = MoeSpec(
        experts=config.whole("num_local_experts", "num_experts"),
        top_k=config.whole("num_experts_per_tok"),
        ffn_dim=config.whole("intermediate_size"),
    )
    base = _gated(config, theta=_MIXTRAL_ROPE_THETA, epsilon=1e-5)
    return replace(base, moe=moe, sliding_window=config.whole("sliding_window", default=0))


def _qwen_window(config: HfValues) -> int:
    """Qwen's sliding window, which starts at layer `max_window_layers` and only with `use_sliding_window`."""
    layers = config.whole("num_hidden_layers")
    first = config.whole("max_window_layers", default=28)
    if not config.flag("use_sliding_window") or first >= layers:
        return 0
    if first > 0:
        raise config.refuse(f"layers {first} to {layers - 1} have a sliding window, the others have none")
    return config.whole("sliding_window", default=4096)


def _qwen2(config: HfValues) -> ModelSpec:
    return replace(_gated(config), qkv_bias=True, sliding_window=_qwen_window(config))


def _qwen3(config: HfValues, head_dim: int = 128) -> ModelSpec:
    bias = config.flag("attention_bias")
    base = replace(_gated(config, head_dim), sliding_window=_qwen_window(config))
    return replace(base, qk_norm=True, qkv_bias=bias, attention_out_bias=bias)


def _qwen_dense_layers(config: HfValues) -> int:
    """Leading dense layers of a Qwen MoE; dense layers elsewhere are refused."""
    if config.whole("decoder_sparse_step", default=1) != 1:
        raise config.refuse(f"decoder_sparse_step is {config.values['decoder_sparse_step']}: sparse layers alternate")
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or sorted(map(str, dense)) != sorted(map(str, range(len(dense)))):
        raise config.refuse(f"mlp_only_layers is {show(dense)}: only leading layers can be dense")
    return len(dense)


def _qwen_moe(config: HfValues, shared_ffn_dim: int) -> MoeSpec:
    return MoeSpec(
        experts=config.whole("num_experts", "num_local_experts"),
        top_k=config.whole("num_experts_per_tok"),
        ffn_dim=config.whole("moe_intermediate_size"),
        shared_ffn_dim=shared_ffn_dim,
        shared_gate=shared_ffn_dim > 0,
        dense_layers=_qwen_dense_layers(config),
    )


def _qwen2_moe(config: HfValues) -> ModelSpec:
    moe = _qwen_moe(config, config.whole("shared_expert_intermediate_size"))
    return replace(_qwen2(config), qkv_bias=config.flag("qkv_bias", default=True), moe=moe)


def _qwen3_moe(config: HfValues) -> ModelSpec:
    return replace(_qwen3(config, head_dim=0), moe=_qwen_moe(config, 0))


def _deepseek(config: HfValues, router_bias: bool = False) -> ModelSpec:
    mla = MlaSpec(
        q_lora_rank=config.whole("q_lora_rank", default=0),
        kv_lora_rank=config.whole("kv_lora_rank"),
        qk_nope_head_dim=config.whole("qk_nope_head_dim"),
        qk_rope_head_dim=config.whole("qk_rope_head_dim"),
        v_head_dim=config.whole("v_head_dim"),
    )
    bias = config.flag("attention_bias")
    base = replace(_gated(config, mla.v_head_dim), head_dim=mla.v_head_dim, mla=mla)  # head_dim there: the rotary part
    return replace(base, moe=_deepseek_moe(config, router_bias), qkv_bias=bias, attention_out_bias=bias)


def _deepseek_moe(config: HfValues, router_bias: bool) -> MoeSpec | None:
    if config.whole("moe_layer_freq", default=1) != 1:
        raise config.refuse(f"moe_layer_freq is {config.values['moe_layer_freq']}: sparse layers alternate")
    experts = config.whole("n_routed_experts", "num_local_experts", default=0)
    if not experts:
        return None
    width = config.whole("moe_intermediate_size")
    return MoeSpec(
        experts=experts,
        top_k=config.whole("num_experts_per_tok"),
        ffn_dim=width,
        shared_ffn_dim=width * config.whole("n_shared_experts", default=0),
        dense_layers=min(config.whole("first_k_dense_replace", default=0), config.whole("num_hidden_layers")),
        router_bias=router_bias,
    )


def _deepseek_v3(config: HfValues) -> ModelSpec:
    # The correction bias exists with this method only, and DeepseekV3Config of transformers knows no other.
    return _deepseek(config, router_bias=config.values.get("topk_method", "noaux_tc") == "noaux_tc")


def _plain(config: HfValues) -> ModelSpec:
    """The common part of GPT-2 and BLOOM: LayerNorm, a plain MLP, biases everywhere, a tied head."""
    hidden, heads = config.whole("n_embd", "n_embed", "hidden_size"), config.whole("n_head", "num_attention_heads")
    return ModelSpec(
        name=config.name,
        hidden_dim=hidden,
        n_layers=config.whole("n_layer", "num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=_head_dim(config, hidden, heads),
        ffn_dim=config.whole("n_inner", default=4 * hidden),
        vocab_size=config.whole("vocab_size"),
        seq_len=config.seq_len,
        gated_mlp=False,
        norm="layernorm",
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
        norm_epsilon=config.real("layer_norm_epsilon", "layer_norm_eps", default=1e-5),
    )


def _gpt2(config: HfValues) -> ModelSpec:
    positions = config.whole("n_positions", default=1024)
    return replace(_plain(config), position="learned", positions=positions, seq_len=min(positions, config.seq_len))


def _bloom(config: HfValues) -> ModelSpec:
    seq_len = config.whole("seq_length", default=2048)  # what BLOOM was trained with; newer files leave it out
    return replace(_plain(config), position="alibi", embedding_norm=True, seq_len=seq_len)


_ARCHITECTURES: Final[dict[str, Callable[[HfValues], ModelSpec]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek_v3,
    "gpt2": _gpt2,
    "bloom": _bloom,
    "internlm2": _internlm2,
}
SUPPORTED_MODEL_TYPES: Final = tuple(_ARCHITECTURES)
"""The `model_type`s that can be read."""
