"""Names of parameters: ours (`layers.3.mlp.up.weight`) against those of Hugging Face's files, family by family.

Our rotary embedding turns the halves of a head against each other as transformers' `rotate_half` does, so that query
and key rows keep their order. The families differ in the names around experts only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cost_models.model import ModelSpec

UNSUPPORTED: Final = "C660"


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFamily:
    """An architecture of transformers that our decoder computes exactly.

    Attributes:
        model_type, architecture: as config.json names them.
        experts: whose names the experts have; empty without experts.
    """

    model_type: str
    architecture: str
    experts: Literal["", "mixtral", "qwen"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfTensors:
    """Where one of our parameters stands in the files.

    Attributes:
        names: of tensors; one for each expert where ours is a stack of them.
        stacked: ours has the experts as its first axis.
    """

    names: tuple[str, ...]
    stacked: bool = False


FAMILIES: Final[dict[str, HfFamily]] = {
    family.model_type: family
    for family in (
        HfFamily(model_type="llama", architecture="LlamaForCausalLM"),
        HfFamily(model_type="mistral", architecture="MistralForCausalLM"),
        HfFamily(model_type="qwen2", architecture="Qwen2ForCausalLM"),
        HfFamily(model_type="qwen3", architecture="Qwen3ForCausalLM"),
        HfFamily(model_type="mixtral", architecture="MixtralForCausalLM", experts="mixtral"),
        HfFamily(model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", experts="qwen"),
        HfFamily(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", experts="qwen"),
    )
}


def family_of(model: ModelSpec) -> HfFamily:
    """The architecture of transformers that computes what our decoder computes for this model.

    Raises:
        TitanPlanError: C660 where there is none, with the reason.
    """
    reason = _unlike(model)
    found = None if reason else (_dense_family(model) if model.moe is None else _sparse_family(model))
    if found is None:
        reason = reason or "no architecture has this mix of biases, query/key norms, window and experts"
        raise unsupported(f"{model.name} has no Hugging Face form: {reason}")
    return FAMILIES[found]


def unsupported(message: str) -> TitanPlanError:
    """The error for an architecture that we neither read nor write."""
    return TitanPlanError(UNSUPPORTED, message, f"supported: {', '.join(FAMILIES)}")


def _unlike(model: ModelSpec) -> str:
    """What sets a model apart from every family; empty for nothing."""
    if model.mla:
        return "DeepSeek's experts are chosen in groups and weighed by a factor that our router does not have"
    if model.norm != "rmsnorm" or model.position != "rope" or not model.gated_mlp or model.embedding_norm:
        return "only decoders with RMSNorm, rotary positions and gated MLPs are covered"
    return ""


def _dense_family(model: ModelSpec) -> str | None:
    alike = model.qkv_bias == model.attention_out_bias
    if model.qk_norm:
        return "qwen3" if alike and not model.mlp_bias else None
    if model.sliding_window and alike:
        return "mistral" if not (model.qkv_bias or model.mlp_bias) else None
    if alike:
        return "llama"
    return "qwen2" if model.qkv_bias and not model.mlp_bias else None


def _sparse_family(model: ModelSpec) -> str | None:
    moe = model.moe
    assert moe is not None  # noqa: S101 - `family_of` asked
    if model.mlp_bias or moe.router_bias:
        return None
    if model.qk_norm:
        return "qwen3_moe" if not moe.shared_ffn_dim and model.qkv_bias == model.attention_out_bias else None
    if moe.shared_ffn_dim:
        return "qwen2_moe" if moe.shared_gate and not model.attention_out_bias else None
    biased = model.qkv_bias or model.attention_out_bias
    return "mixtral" if not (biased or moe.dense_layers) else None


_OUTSIDE: Final = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_INSIDE: Final = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
}
_ROUTER: Final = {"mixtral": "block_sparse_moe.gate.weight", "qwen": "mlp.gate.weight"}
_EXPERT: Final = {
    "mixtral": ("block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen": ("mlp.experts", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}


def hf_tensors(name: str, family: HfFamily, experts: int = 0) -> HfTensors:
    """Where our parameter `name` stands in the files of a family.

    Args:
        experts: routed experts a layer.

    Raises:
        KeyError: where the family has no such parameter.
    """
    if name in _OUTSIDE:
        return HfTensors(names=(_OUTSIDE[name],))
    _, layer, inner = name.split(".", 2)
    place = f"model.layers.{layer}"
    if inner.startswith("mlp.experts."):
        folder, parts = _EXPERT[family.experts]
        part = parts[inner.removeprefix("mlp.experts.")]
        return HfTensors(names=tuple(f"{place}.{folder}.{e}.{part}.weight" for e in range(experts)), stacked=True)
    if inner == "mlp.router.weight":
        return HfTensors(names=(f"{place}.{_ROUTER[family.experts]}",))
    if inner == "mlp.shared_gate":
        return HfTensors(names=(f"{place}.mlp.shared_expert_gate.weight",))
    stem, _, kind = inner.rpartition(".")
    return HfTensors(names=(f"{place}.{_INSIDE[stem]}.{kind}",))


def whole_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters of a supported model, without padding; a tied head is not among them."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (model.vocab_size, model.hidden_dim)}
    for index in range(model.n_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(model, index)}
    shapes["head.norm.weight"] = (model.hidden_dim,)
    if not model.tied_embeddings:
        shapes["head.weight"] = (model.vocab_size, model.hidden_dim)
    return shapes


def _layer_shapes(model: ModelSpec, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, query, key = model.hidden_dim, model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    yield "attention_norm.weight", (hidden,)
    for name, rows in (("q", query), ("k", key), ("v", key)):
        yield from _linear(f"attention.{name}", rows, hidden, bias=model.qkv_bias)
    yield from _linear("attention.out", hidden, query, bias=model.attention_out_bias)
    if model.qk_norm:
        yield "attention.q_norm.weight", (model.head_dim,)
        yield "attention.k_norm.weight", (model.head_dim,)
    yield "mlp_norm.weight", (hidden,)
    if model.moe is None or index < model.dense_layers:
        yield from _mlp("mlp", model.ffn_dim, model)
        return
    moe = model.moe
    yield "mlp.router.weight", (moe.experts, hidden)
    for name in ("gate", "up"):
        yield f"mlp.experts.{name}", (moe.experts, moe.ffn_dim, hidden)
    yield "mlp.experts.down", (moe.experts, hidden, moe.ffn_dim)
    if moe.shared_ffn_dim:
        yield from _mlp("mlp.shared", moe.shared_ffn_dim, model)
    if moe.shared_gate:
        yield "mlp.shared_gate", (1, hidden)


def _mlp(name: str, width: int, model: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in ("gate", "up"):
        yield from _linear(f"{name}.{part}", width, model.hidden_dim, bias=model.mlp_bias)
    yield from _linear(f"{name}.down", model.hidden_dim, width, bias=model.mlp_bias)


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)
