"""ModelSpec: the architecture of a decoder, its parameters by component, and the FLOPs of one token."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal

from cost_models.errors import TitanPlanError
from cost_models.yaml_numbers import check_name, plain, shorten

Norm = Literal["rmsnorm", "layernorm"]
Position = Literal["rope", "learned", "alibi", "none"]

_WIDTH: Final = 10**7
_TOKENS: Final = 10**8
_MOST: Final = {
    "n_layers": 10**4,
    "dense_layers": 10**4,
    "vocab_size": 10**9,
    "seq_len": _TOKENS,
    "positions": _TOKENS,
    "sliding_window": _TOKENS,
}
"""Sizes beyond which a number is a slip of the keyboard; every other size is a width or a count of at most 10**7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Mixture of experts of each sparse layer.

    Attributes:
        experts: routed experts a layer.
        top_k: routed experts a token visits.
        ffn_dim: hidden width of one routed expert.
        shared_ffn_dim: summed hidden width of the shared experts; 0 for none.
        shared_gate: a learned gate (hidden -> 1) scales the shared expert's output (Qwen2-MoE).
        dense_layers: leading layers that keep a dense MLP of `ModelSpec.ffn_dim`.
        router_bias: the router holds one bias an expert (DeepSeek-V3's load-balancing correction).
    """

    experts: int
    top_k: int
    ffn_dim: int
    shared_ffn_dim: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    router_bias: bool = False

    def __post_init__(self) -> None:
        _require_positive(self, "experts", "top_k", "ffn_dim")
        _require_not_negative(self, "shared_ffn_dim", "dense_layers")
        if self.top_k > self.experts:
            raise TitanPlanError(
                "C610",
                f"moe.top_k is {self.top_k}, more than moe.experts ({self.experts})",
                "a token visits at most all experts",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        q_lora_rank: width that queries are compressed to; 0 where they are not.
        kv_lora_rank: width of the latent that keys and values are expanded from.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        _require_positive(self, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        _require_not_negative(self, "q_lora_rank")

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        head_dim: width of one head; it need not be hidden_dim / n_heads (Qwen3).
        ffn_dim: hidden width of the dense MLP.
        gated_mlp: gate and up projections (SwiGLU) against one (GELU).
        qkv_bias, attention_out_bias, mlp_bias: biases of the linear layers.
        qk_norm: RMSNorm of width head_dim on queries and keys.
        embedding_norm: a norm after the token embedding (BLOOM).
        positions: learned position embeddings, where `position` is "learned".
        sliding_window: tokens that attention looks back; 0 for all.
        rope_theta: base of the rotary angles, where `position` is "rope"; it costs nothing, results depend on it.
        norm_epsilon: added under the root of every norm; it costs nothing either.
        seq_len: the sequence length the model was pre-trained with; the default of a search.
    """

    name: str
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    seq_len: int = 4096
    gated_mlp: bool = True
    norm: Norm = "rmsnorm"
    position: Position = "rope"
    positions: int = 0
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embedding_norm: bool = False
    tied_embeddings: bool = False
    sliding_window: int = 0
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        _require_positive(
            self,
            "hidden_dim",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "ffn_dim",
            "vocab_size",
            "seq_len",
        )
        _require_not_negative(self, "positions", "sliding_window")
        _require_between(self, "rope_theta", 1.0, 1e12)
        _require_between(self, "norm_epsilon", 0.0, 0.1)
        if self.position == "learned" and not self.positions:
            raise TitanPlanError(
                "C610",
                f"{plain(self.name)}: position is learned and positions is 0",
                "give the number of learned positions, such as 2048",
            )
        if self.n_heads % self.n_kv_heads:
            raise TitanPlanError(
                "C610",
                f"{plain(self.name)}: n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}",
                "each key/value head serves the same number of query heads",
            )
        key, rotated = ("mla.qk_rope_head_dim", self.mla.qk_rope_head_dim) if self.mla else ("head_dim", self.head_dim)
        if self.position == "rope" and rotated % 2:
            raise TitanPlanError(
                "C610",
                f"{plain(self.name)}: {key} is {rotated}, and position is rope",
                f"rotary positions turn pairs of numbers: give an even one, such as {rotated + 1}",
            )
        if self.moe is not None and not 0 <= self.moe.dense_layers <= self.n_layers:
            raise TitanPlanError(
                "C610",
                f"{plain(self.name)}: moe.dense_layers is {self.moe.dense_layers}, of {self.n_layers} layers",
                "give a number between 0 and n_layers",
            )

    @property
    def dense_layers(self) -> int:
        """Layers with a dense MLP; all of them without MoE."""
        return self.n_layers if self.moe is None else self.moe.dense_layers

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.n_layers - self.dense_layers

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head as attention sees it."""
        return self.mla.qk_head_dim if self.mla else self.head_dim

    @property
    def v_head_dim(self) -> int:
        """Width of a value head as attention sees it."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def attention_kv_heads(self) -> int:
        """Key/value heads as attention sees them: MLA expands its latent to every head."""
        return self.n_heads if self.mla else self.n_kv_heads

    @property
    def norm_params(self) -> int:
        """Parameters of one norm of width hidden_dim."""
        return self.hidden_dim * (2 if self.norm == "layernorm" else 1)

    @property
    def attention_params(self) -> int:
        """Parameters of one attention block, its query/key norms included, the layer norm before it apart."""
        if self.mla:
            return _mla_params(self, self.mla)
        query = self.n_heads * self.head_dim
        key_value = 2 * self.n_kv_heads * self.head_dim
        weights = self.hidden_dim * (2 * query + key_value)
        biases = (query + key_value) * self.qkv_bias + self.hidden_dim * self.attention_out_bias
        return weights + biases + 2 * self.head_dim * self.qk_norm

    @property
    def mlp_params(self) -> int:
        """Parameters of one dense MLP."""
        return self._mlp_of(self.ffn_dim)

    @property
    def expert_params(self) -> int:
        """Parameters of ONE routed expert; 0 without MoE."""
        return self._mlp_of(self.moe.ffn_dim) if self.moe else 0

    @property
    def shared_expert_params(self) -> int:
        """Parameters of the shared experts of one sparse layer, with their gate."""
        if not self.moe or not self.moe.shared_ffn_dim:
            return 0
        return self._mlp_of(self.moe.shared_ffn_dim) + self.hidden_dim * self.moe.shared_gate

    @property
    def router_params(self) -> int:
        """Parameters of the router of one sparse layer."""
        return self.moe.experts * (self.hidden_dim + self.moe.router_bias) if self.moe else 0

    @property
    def dense_layer_params(self) -> int:
        """Parameters of one layer with a dense MLP."""
        return self.attention_params + self.mlp_params + 2 * self.norm_params

    @property
    def moe_layer_params(self) -> int:
        """Parameters of one layer with all its routed experts."""
        if not self.moe:
            return 0
        experts = self.moe.experts * self.expert_params
        return self.attention_params + experts + self.shared_expert_params + self.router_params + 2 * self.norm_params

    @property
    def embedding_params(self) -> int:
        """Token and position embeddings, and the norm behind them."""
        norm = self.norm_params if self.embedding_norm else 0
        return (self.vocab_size + self.positions) * self.hidden_dim + norm

    @property
    def head_params(self) -> int:
        """The output projection; 0 where it is the embedding."""
        return 0 if self.tied_embeddings else self.vocab_size * self.hidden_dim

    @property
    def total_params(self) -> int:
        """All parameters, as published for the whole model."""
        layers = self.dense_layers * self.dense_layer_params + self.moe_layers * self.moe_layer_params
        return layers + self.embedding_params + self.norm_params + self.head_params

    @property
    def active_params(self) -> int:
        """Parameters that one token meets."""
        if not self.moe:
            return self.total_params
        idle = (self.moe.experts - self.moe.top_k) * self.expert_params
        return self.total_params - self.moe_layers * idle

    def matmul_params_per_token(self) -> int:
        """Weights of GEMMs that one token meets, output projection included, embedding look-up and norms not."""
        attention = _attention_matmul_params(self)
        factor = self.hidden_dim * (3 if self.gated_mlp else 2)
        total = self.n_layers * attention + self.dense_layers * factor * self.ffn_dim
        if self.moe:
            wide = self.moe.top_k * self.moe.ffn_dim + self.moe.shared_ffn_dim
            gate = self.hidden_dim * (self.moe.experts + self.moe.shared_gate)
            total += self.moe_layers * (factor * wide + gate)
        return total + self.vocab_size * self.hidden_dim

    def attended_pairs(self, seq_len: int) -> float:
        """Query-key pairs of one sequence under the causal mask (half of seq^2) and the sliding window."""
        if self.sliding_window and self.sliding_window < seq_len:
            window = self.sliding_window
            return window * (seq_len - window / 2)
        return seq_len * seq_len / 2

    def forward_flops_per_sequence(self, seq_len: int) -> float:
        """Model FLOPs of one forward pass of one sequence; causal attention counted half, no recompute."""
        gemm = 2.0 * self.matmul_params_per_token() * seq_len
        heads = self.n_heads * (self.qk_head_dim + self.v_head_dim)
        return gemm + 2.0 * self.n_layers * heads * self.attended_pairs(seq_len)

    def _mlp_of(self, ffn_dim: int) -> int:
        projections = 3 if self.gated_mlp else 2
        bias = (projections - 1) * ffn_dim + self.hidden_dim if self.mlp_bias else 0
        return projections * self.hidden_dim * ffn_dim + bias


def _require_positive(spec: object, *names: str) -> None:
    """Reject a size that is not a whole number above zero, or that no model has."""
    _require_whole(spec, 1, names)


def _require_not_negative(spec: object, *names: str) -> None:
    """Reject a size that is not a whole number of zero or more, or that no model has."""
    _require_whole(spec, 0, names)


def _require_whole(spec: object, least: int, names: tuple[str, ...]) -> None:
    for name in names:
        value, most = getattr(spec, name), _MOST.get(name, _WIDTH)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            hint = f"a whole number of at least {least} is needed"
            raise TitanPlanError("C610", f"{name} is {shorten(value)}", hint)
        if value > most:
            hint = f"a whole number from {least} to {most:,} is needed"
            raise TitanPlanError("C610", f"{name} is {shorten(value)}, above the bound of {most:,}", hint)


def _require_between(spec: object, name: str, above: float, most: float) -> None:
    """Reject what is no number above one bound and up to another; NaN is none."""
    value = getattr(spec, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:
        hint = f"a number above {above:g}, at most {most:g}, is needed"
        raise TitanPlanError("C610", f"{name} is {shorten(value)}", hint)


def _attention_matmul_params(model: ModelSpec) -> int:
    """GEMM weights of one attention block."""
    if not model.mla:
        return model.hidden_dim * model.head_dim * 2 * (model.n_heads + model.n_kv_heads)
    mla = model.mla
    query = model.n_heads * mla.qk_head_dim
    down_up = model.hidden_dim * mla.q_lora_rank + mla.q_lora_rank * query
    queries = down_up if mla.q_lora_rank else model.hidden_dim * query
    latent = model.hidden_dim * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    expand = mla.kv_lora_rank * model.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + latent + expand + model.n_heads * mla.v_head_dim * model.hidden_dim


def _mla_params(model: ModelSpec, mla: MlaSpec) -> int:
    """Parameters of one MLA block: its GEMMs and the two latent norms; biases as the model says."""
    bias = (mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim) * model.qkv_bias
    out_bias = model.hidden_dim * model.attention_out_bias
    return _attention_matmul_params(model) + mla.q_lora_rank + mla.kv_lora_rank + bias + out_bias


def model_field_names() -> tuple[str, ...]:
    """Keys that a model file may hold."""
    return tuple(field.name for field in fields(ModelSpec))
