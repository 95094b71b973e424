"""The one table of operators: GEMM sizes, vector traffic, saved tensors and collectives of a decoder, per micro batch.

Memory, compute time, recompute savings and traffic are all read from here. Every size is a column over layouts, for one
rank and one micro batch. Saved tensors follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4) with dropout and
unfused attention; a fused attention kernel keeps its inputs, its output and softmax statistics instead of the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models.attention_pairs import biased, biased_pairs
from cost_models.layout import CP_KINDS, Column, Layouts
from cost_models.model import ModelSpec
from cost_models.operator_values import Collective, Gemm, Operator, Phase, Saved
from cost_models.stack import Stack
from cost_models.workload import Workload

ULYSSES, ALLGATHER, RING = (CP_KINDS.index(kind) for kind in ("ulysses", "allgather", "ring"))
_PHASES: tuple[Phase, ...] = ("forward", "backward")
_FP32 = 4
_INT64 = 8


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the operators need of the layouts: tokens of a micro batch on a rank, before and after sequence sharding."""

    tp: Column
    cp: Column
    cp_kind: Column
    ep: Column
    micro_batch: Column
    gathered: Column  # tokens that tensor-parallel GEMMs see
    sharded: Column  # tokens that norms and residuals see; equal to `gathered` without sp
    sp: Column  # 1 with sequence parallelism, 0 without

    @classmethod
    def of(cls, layouts: Layouts, workload: Workload) -> Shapes:
        """Shapes of a micro batch for each layout."""
        tokens = layouts.micro_batch * float(workload.seq_len) / layouts.cp
        sharded = np.where(layouts.sp == 1, tokens / layouts.tp, tokens)
        return cls(
            tp=layouts.tp.astype(float),
            cp=layouts.cp.astype(float),
            cp_kind=layouts.cp_kind,
            ep=layouts.ep.astype(float),
            micro_batch=layouts.micro_batch.astype(float),
            gathered=tokens,
            sharded=sharded,
            sp=layouts.sp.astype(float),
        )


class OperatorTable:
    """The operators of one model under one workload and stack, for a set of layouts.

    Args:
        softmax_statistics_bytes: bytes a token and head that the device's fused attention kernel makes for backward.
    """

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        stack: Stack,
        shapes: Shapes,
        *,
        softmax_statistics_bytes: float = 4.0,
    ) -> None:
        self._model = model
        self._workload = workload
        self._stack = stack
        self._x = shapes
        self._width = workload.numbers.activation_bytes
        kept = stack.statistics_bytes
        self._statistics = softmax_statistics_bytes if kept is None else min(kept, softmax_statistics_bytes)

    def dense_layer(self) -> tuple[Operator, ...]:
        """Operators of a layer with a dense MLP, in order of execution."""
        return (
            *self._attention_block(),
            self._norm("mlp_norm"),
            *self._mlp(self._model.ffn_dim),
            self._residual("mlp"),
        )

    def moe_layer(self) -> tuple[Operator, ...]:
        """Operators of a layer with routed experts, tokens balanced over experts, in order of execution."""
        moe = self._model.moe
        if moe is None:
            return ()
        shared = self._mlp(moe.shared_ffn_dim, "shared_") if moe.shared_ffn_dim else ()
        if shared and moe.shared_gate:
            gate = Gemm(self._x.sharded, _col(self._model.hidden_dim), _col(1.0))
            shared = (*shared, Operator("shared_gate", gemms=(gate,)))
        return (*self._attention_block(), self._norm("mlp_norm"), *self._experts(), *shared, self._residual("mlp"))

    def embedding(self) -> tuple[Operator, ...]:
        """Token look-up cut by vocabulary, its reduction, position embedding and norm."""
        x, h, w = self._x, self._model.hidden_dim, self._width
        full, own = x.gathered * h * w, x.sharded * h * w
        gather = np.where(x.sp == 1, full, 0.0)
        reduce_ = np.where(x.sp == 1, 0.0, full)
        look_up = Operator(
            "embedding",
            forward_bytes=2 * full,
            backward_bytes=2 * full,
            saved=(Saved("token_ids", x.gathered * _INT64),),
            collectives=(
                Collective("reduce_scatter", "tp", gather, "forward"),
                Collective("all_reduce", "tp", reduce_, "forward"),
                Collective("all_gather", "tp", gather, "backward"),
            ),
        )
        learned = self._model.position == "learned"
        position = (Operator("position", forward_bytes=2 * own, backward_bytes=own),) if learned else ()
        norm = (self._norm("embedding_norm"),) if self._model.embedding_norm else ()
        dropout = (self._dropout("embedding_dropout"),) if self._workload.dropout else ()
        return (look_up, *position, *norm, *dropout)

    def head(self) -> tuple[Operator, ...]:
        """Final norm, output projection cut by vocabulary, and the loss."""
        x, h, w = self._x, self._model.hidden_dim, self._width
        vocab = padded_vocab(self._model.vocab_size, x.tp) / x.tp
        full = x.gathered * h * w
        logits = x.gathered * vocab
        # Unchunked, the logits live from forward to backward in full precision (Korthikanti 2022, section 4.3).
        # In chunks, gradients are made along with the loss and wait for backward, those of the matrix beside those of
        # hidden states.
        chunked = self._stack.loss_chunk_tokens > 0
        kept = Saved("head_gradient", vocab * h * w) if chunked else Saved("logits", logits * _FP32)
        projection = Operator(
            "head",
            gemms=(Gemm(x.gathered, _col(h), vocab),),
            forward_bytes=logits * (w + _FP32),
            backward_bytes=logits * (w + _FP32),
            forward_kernels=4,
            backward_kernels=3,
            saved=(self._column_input("head_input"), kept),
            collectives=self._head_collectives(full),
        )
        return (self._norm("final_norm"), projection)

    def _head_collectives(self, full: Column) -> tuple[Collective, ...]:
        """In chunks: the input is gathered once, its gradient summed at once, and each chunk tells maximum and sums."""
        x, chunk = self._x, self._stack.loss_chunk_tokens
        if not chunk:
            return self._column_collectives(full)
        with_sp, without = self._by_sp(full)
        chunks = np.ceil(x.gathered / chunk)
        # A maximum, then a sum of exponents and the label's logit: numbers in full precision a token.
        each = tuple(
            Collective("all_reduce", "tp", x.gathered / chunks * numbers * _FP32, "forward", count=chunks)
            for numbers in (1, 2)
        )
        return (
            Collective("all_gather", "tp", with_sp, "forward"),
            Collective("reduce_scatter", "tp", with_sp, "forward"),
            Collective("all_reduce", "tp", without, "forward"),
            *each,
        )

    def _by_sp(self, full: Column) -> tuple[Column, Column]:
        """Bytes where the sequence is sharded over tp, and where it is not."""
        return np.where(self._x.sp == 1, full, 0.0), np.where(self._x.sp == 1, 0.0, full)

    def _attention_block(self) -> tuple[Operator, ...]:
        return (
            self._norm("attention_norm"),
            *(self._mla_projections() if self._model.mla else self._qkv_projection()),
            *self._attention_core(),
            self._output_projection(),
            self._residual("attention"),
        )

    def _norm(self, name: str) -> Operator:
        """A norm over sharded tokens keeps its input and one (RMS) or two statistics a token."""
        own = self._x.sharded * self._model.hidden_dim * self._width
        values = 2 if self._model.norm == "layernorm" else 1
        extra = self._stack.norm_saved_values
        return Operator(
            name,
            forward_bytes=2 * own,
            backward_bytes=3 * own,
            forward_kernels=1 if self._stack.fused_norm_and_rope else 4,
            backward_kernels=1 if self._stack.fused_norm_and_rope else 6,
            saved=(
                Saved(f"{name}_input", own * (1 + extra)),
                Saved(f"{name}_statistics", self._x.sharded * _FP32 * values),
            ),
            redone_by="norm",
        )

    def _column_input(self, name: str) -> Saved:
        """The input of a column-parallel layer: kept sharded and gathered again in backward, or kept gathered."""
        tokens = self._x.gathered if self._stack.saves_gathered_inputs else self._x.sharded
        return Saved(name, tokens * self._model.hidden_dim * self._width, "norm")

    def _column_collectives(self, full: Column) -> tuple[Collective, ...]:
        """sp: gather before, scatter the gradient, gather the input again for wgrad. No sp: all-reduce the gradient."""
        with_sp, without = self._by_sp(full)
        again = 0.0 if self._stack.saves_gathered_inputs else 1.0
        return (
            Collective("all_gather", "tp", with_sp, "forward"),
            Collective("all_gather", "tp", with_sp * again, "backward"),
            Collective("reduce_scatter", "tp", with_sp, "backward"),
            Collective("all_reduce", "tp", without, "backward"),
        )

    def _row_collectives(self, full: Column, *, in_recompute: bool = True) -> tuple[Collective, ...]:
        """sp: scatter the output, gather its gradient. No sp: all-reduce the output."""
        with_sp, without = self._by_sp(full)
        return (
            Collective("reduce_scatter", "tp", with_sp, "forward", in_recompute=in_recompute),
            Collective("all_reduce", "tp", without, "forward", in_recompute=in_recompute),
            Collective("all_gather", "tp", with_sp, "backward"),
        )

    def _copy_collectives(self, full: Column) -> tuple[Collective, ...]:
        """Kept gathered: with sp gather before and scatter the gradient, without sp all-reduce the gradient."""
        with_sp, without = self._by_sp(full)
        return (
            Collective("all_gather", "tp", with_sp, "forward"),
            Collective("reduce_scatter", "tp", with_sp, "backward"),
            Collective("all_reduce", "tp", without, "backward"),
        )

    def _qkv_projection(self) -> tuple[Operator, ...]:
        m, x, w = self._model, self._x, self._width
        query, key = m.n_heads * m.head_dim / x.tp, m.n_kv_heads * m.head_dim / x.tp
        rotated = x.gathered * (query + key) * w
        projection = Operator(
            "qkv",
            gemms=(Gemm(x.gathered, _col(m.hidden_dim), query + 2 * key),),
            saved=(self._column_input("qkv_input"),),
            collectives=self._column_collectives(x.gathered * m.hidden_dim * w),
        )
        return (projection, *self._query_key_norm(rotated), *self._rotary(rotated))

    def _query_key_norm(self, rotated: Column) -> tuple[Operator, ...]:
        m, x = self._model, self._x
        if not m.qk_norm:
            return ()
        statistics = x.gathered * (m.n_heads + m.n_kv_heads) / x.tp * _FP32
        saved = (Saved("qk_norm_input", rotated), Saved("qk_norm_statistics", statistics))
        return (Operator("qk_norm", forward_bytes=2 * rotated, backward_bytes=3 * rotated, saved=saved),)

    def _rotary(self, rotated: Column) -> tuple[Operator, ...]:
        """Rotary embedding is linear in its input: backward rotates the other way and keeps nothing."""
        if self._model.position != "rope":
            return ()
        kernels = 1 if self._stack.fused_norm_and_rope else 8
        return (
            Operator(
                "rope",
                forward_bytes=2 * rotated,
                backward_bytes=2 * rotated,
                forward_kernels=kernels,
                backward_kernels=kernels,
            ),
        )

    def _mla_projections(self) -> tuple[Operator, ...]:
        """Latents are made on sharded tokens with whole weights, then gathered: they are far narrower than hidden.

        Without sp each rank makes them whole, but its heads give only a part of their gradient: all-reduce.
        """
        m, x, w, mla = self._model, self._x, self._width, self._model.mla
        assert mla is not None  # noqa: S101 - the caller branched on it
        heads = m.n_heads / x.tp
        latent_kv = mla.kv_lora_rank + mla.qk_rope_head_dim
        down = Operator(
            "latent_down",
            gemms=(Gemm(x.sharded, _col(m.hidden_dim), _col(mla.q_lora_rank + latent_kv)),),
            saved=(Saved("latent_input", x.sharded * m.hidden_dim * w, "norm"),),
        )
        wide = x.sharded * (mla.q_lora_rank + mla.kv_lora_rank) * w
        norm = Operator(
            "latent_norm",
            forward_bytes=2 * wide,
            backward_bytes=3 * wide,
            saved=(Saved("latent_norm_input", wide), Saved("latent_norm_statistics", 2 * x.sharded * _FP32)),
            redone_by="norm",
        )
        source = mla.q_lora_rank or m.hidden_dim
        read = x.gathered * w
        up = Operator(
            "latent_up",
            gemms=(
                Gemm(x.gathered, _col(source), heads * mla.qk_head_dim),
                Gemm(x.gathered, _col(mla.kv_lora_rank), heads * (mla.qk_nope_head_dim + mla.v_head_dim)),
            ),
            forward_kernels=2,
            backward_kernels=4,
            saved=(Saved("latent_up_input", wide, "norm"),),
            collectives=(
                *self._column_collectives(read * source),
                *self._column_collectives(read * mla.kv_lora_rank),
                *self._copy_collectives(read * mla.qk_rope_head_dim),
            ),
        )
        return (down, norm, up, *self._rotary(2 * x.gathered * heads * mla.qk_rope_head_dim * w))

    def _attention_core(self) -> tuple[Operator, ...]:
        m, x, w = self._model, self._x, self._width
        heads = m.n_heads / x.tp
        products = 2.0 * heads * self._pairs() * x.micro_batch
        query = x.gathered * heads * m.qk_head_dim * w
        kv_heads = m.attention_kv_heads / x.tp
        # Ulysses deals whole heads: with fewer local key/value heads than cp ranks each rank holds one, repeated.
        kv_repeat = np.where(x.cp_kind == ULYSSES, np.maximum(x.cp / kv_heads, 1.0), 1.0)
        key, value = (x.gathered * kv_heads * kv_repeat * width * w for width in (m.qk_head_dim, m.v_head_dim))
        key_value = key + value
        output = x.gathered * heads * m.v_head_dim * w
        saved = [Saved("query", query), Saved("key_value", key_value), Saved("attention_output", output)]
        saved.append(Saved("exchanged_output", np.where(x.cp_kind == ULYSSES, output, 0.0)))
        forward_bytes = backward_bytes = np.asarray(query + key_value + output)
        kernels, fused = 1, self._workload.fused_attention
        if fused:
            saved.append(Saved("softmax_statistics", x.gathered * heads * self._statistics))
        else:
            scores = x.micro_batch * heads * float(self._workload.seq_len) ** 2 / x.cp
            saved += self._unfused_saved(scores, w)
            forward_bytes = forward_bytes + scores * w * (6 if self._workload.dropout else 4)
            backward_bytes = backward_bytes + scores * w * (9 if self._workload.dropout else 7)
            kernels = 5
        core = Operator(
            "attention",
            gemms=() if fused else self._score_products(heads),
            attention_flops=products * (m.qk_head_dim + m.v_head_dim) if fused else 0.0,
            attention_backward_flops=products * (3 * m.qk_head_dim + 2 * m.v_head_dim) if fused else 0.0,
            forward_bytes=forward_bytes,
            backward_bytes=2 * backward_bytes,
            forward_kernels=kernels,
            backward_kernels=kernels,
            saved=tuple(saved),
            collectives=self._context_collectives(query, key, value, output),
            redone_by="" if fused else "softmax",
        )
        return (core,)

    def _score_products(self, heads: Column) -> tuple[Gemm, ...]:
        """Unfused attention: batched products over the whole square of scores."""
        m, x, seq = self._model, self._x, float(self._workload.seq_len)
        batch = x.micro_batch * heads
        return (
            Gemm(seq / x.cp, _col(m.qk_head_dim), _col(seq), batch, accumulates_weight=False),
            Gemm(seq / x.cp, _col(seq), _col(m.v_head_dim), batch, accumulates_weight=False),
        )

    def _pairs(self) -> Column:
        """Pairs of query and key of a sequence that a rank computes."""
        m, x, seq_len = self._model, self._x, self._workload.seq_len
        if not (self._workload.causal and self._workload.fused_attention):
            return seq_len**2 / x.cp
        if self._stack.computes_masked_bias and biased(m):
            return biased_pairs(seq_len, x.cp, pieces=(x.cp_kind == ALLGATHER) | (x.cp_kind == RING))
        return m.attended_pairs(seq_len) / x.cp

    def _unfused_saved(self, scores: Column, width: int) -> list[Saved]:
        """Softmax output, and with dropout its mask (1 byte) and its result (Korthikanti 2022, section 4.1)."""
        saved = [Saved("softmax_output", scores * width, "softmax")]
        if self._workload.dropout:
            saved += [Saved("softmax_mask", scores, "softmax"), Saved("softmax_dropped", scores * width, "softmax")]
        return saved

    def _context_collectives(self, query: Column, key: Column, value: Column, output: Column) -> tuple[Collective, ...]:
        """Ulysses (arXiv:2309.14509): all-to-all of q, k, v and of the output. All-gather: k and v, again in backward,
        gradients scattered. Ring (arXiv:2310.01889): cp - 1 rounds of k and v, in backward their gradients as well, or
        those are scattered when all are there. A window may hide a whole passed chunk, so k and v are gathered then.
        """
        kind, parts = self._x.cp_kind, self._x.cp
        passes = (kind == RING) & (not (self._model.sliding_window and self._stack.computes_masked_bias))
        gathers = (kind == ALLGATHER) | ((kind == RING) & ~passes)
        scatters = gathers | (passes & (not self._stack.ring_passes_gradients))
        rounds, hops = 1 + self._stack.ring_passes_gradients, np.maximum(parts - 1, 1.0)
        found = [
            Collective("all_to_all", "cp", np.where(kind == ULYSSES, n_bytes, 0.0), phase)
            for n_bytes in (query, key, value, output)
            for phase in _PHASES
        ]
        for n_bytes in (key, value):
            whole, passed = np.where(gathers, n_bytes * parts, 0.0), np.where(passes, n_bytes, 0.0)
            found += [Collective("all_gather", "cp", whole, phase) for phase in _PHASES]
            found += [
                Collective("reduce_scatter", "cp", np.where(scatters, n_bytes * parts, 0.0), "backward"),
                Collective("send_recv", "cp", passed, "forward", count=hops, overlapped=True),
                Collective("send_recv", "cp", passed, "backward", count=rounds * hops, overlapped=True),
            ]
        # A search over many layouts times only what some of them send.
        return tuple(call for call in found if np.any(call.n_bytes))

    def _output_projection(self) -> Operator:
        m, x = self._model, self._x
        return Operator(
            "attention_out",
            gemms=(Gemm(x.gathered, m.n_heads * m.v_head_dim / x.tp, _col(m.hidden_dim)),),
            collectives=self._row_collectives(x.gathered * m.hidden_dim * self._width),
        )

    def _residual(self, name: str) -> Operator:
        """Adding to the residual stream keeps nothing; dropout before it keeps a byte a value."""
        own = self._x.sharded * self._model.hidden_dim
        mask = (Saved(f"{name}_dropout_mask", own),) if self._workload.dropout else ()
        return Operator(
            f"{name}_residual",
            forward_bytes=3 * own * self._width,
            backward_bytes=own * self._width * (2 if self._workload.dropout else 1),
            saved=mask,
            last=name == "mlp",
        )

    def _dropout(self, name: str) -> Operator:
        own = self._x.sharded * self._model.hidden_dim
        moved = 2 * own * self._width
        return Operator(name, forward_bytes=moved, backward_bytes=moved, saved=(Saved(f"{name}_mask", own),))

    def _mlp(self, ffn_dim: int, prefix: str = "") -> tuple[Operator, ...]:
        m, x, w = self._model, self._x, self._width
        wide = ffn_dim / x.tp
        full = x.gathered * m.hidden_dim * w
        return (
            Operator(
                f"{prefix}mlp_up",
                gemms=(Gemm(x.gathered, _col(m.hidden_dim), wide * self._projections),),
                # The shared experts read the same normed tokens as the routed ones: one saved tensor serves both.
                saved=(self._column_input("mlp_input"),) if not prefix else (),
                collectives=self._column_collectives(full),
            ),
            self._activation(f"{prefix}mlp", x.gathered * wide * w),
            Operator(
                f"{prefix}mlp_down",
                gemms=(Gemm(x.gathered, wide, _col(m.hidden_dim)),),
                collectives=self._row_collectives(full),
                # A gate on shared experts keeps their output, which comes after this.
                last=not (prefix and m.moe and m.moe.shared_gate),
            ),
        )

    @property
    def _projections(self) -> int:
        return 2 if self._model.gated_mlp else 1

    def _activation(self, prefix: str, hidden: Column) -> Operator:
        """Keeps what it read (gate and up, or up) and what the down projection reads."""
        read = hidden * self._projections
        return Operator(
            f"{prefix}_activation",
            forward_bytes=read + hidden,
            backward_bytes=2 * read + hidden,
            saved=(Saved(f"{prefix}_up", read), Saved(f"{prefix}_activated", hidden, "activation")),
            redone_by="activation",
        )

    def _experts(self) -> tuple[Operator, ...]:
        """Router, exchange over ep, grouped GEMMs, exchange back. ep = 1: every expert is cut by tp instead."""
        m, x, w, moe = self._model, self._x, self._width, self._model.moe
        assert moe is not None  # noqa: S101 - the caller branched on it
        spread = x.ep > 1
        tokens = np.where(spread, x.sharded, x.gathered) * moe.top_k
        wide = np.where(spread, moe.ffn_dim, moe.ffn_dim / x.tp)
        local_experts = moe.experts / x.ep
        # Balanced routing: all ep ranks together bring tokens * ep to experts / ep experts of this rank.
        rows = tokens / local_experts
        moved = tokens * m.hidden_dim * w
        hidden = tokens * wide * w
        router_logits = x.sharded * moe.experts * _FP32
        router = Operator(
            "router",
            gemms=(Gemm(x.sharded, _col(m.hidden_dim), _col(moe.experts)),),
            forward_bytes=3 * router_logits,
            backward_bytes=3 * router_logits,
            forward_kernels=6,
            backward_kernels=6,
            saved=(self._column_input("mlp_input"), Saved("router_probabilities", 2 * router_logits)),
        )
        up = Operator(
            "experts_up",
            gemms=(Gemm(rows, _col(m.hidden_dim), wide * self._projections, count=local_experts),),
            forward_bytes=2 * moved,
            backward_bytes=2 * moved,
            forward_kernels=4,
            backward_kernels=5,
            saved=(Saved("expert_tokens", moved),),
            collectives=self._to_experts(spread, tokens),
        )
        down = Operator(
            "experts_down",
            gemms=(Gemm(rows, wide, _col(m.hidden_dim), count=local_experts),),
            forward_bytes=2 * moved,
            backward_bytes=2 * moved,
            forward_kernels=3,
            backward_kernels=4,
            collectives=self._from_experts(spread, tokens),
        )
        return (router, up, self._activation("expert", hidden), down)

    def _to_experts(self, spread: Column, tokens: Column) -> tuple[Collective, ...]:
        """Tokens, each choice's weight, and where they go: as counts of rows over ep, as expert numbers over tp."""
        m, x, w, moe = self._model, self._x, self._width, self._model.moe
        assert moe is not None  # noqa: S101 - the caller branched on it
        counts = np.where(spread, float(moe.experts * _INT64), 0.0)
        chosen = np.where(spread, 0.0, x.gathered * moe.top_k)
        return (
            Collective("all_to_all", "ep", counts, "forward"),
            *self._expert_exchange(spread, tokens * m.hidden_dim * w),
            *self._expert_exchange(spread, tokens * w),
            *self._copy_collectives(np.where(spread, 0.0, x.gathered * m.hidden_dim * w)),
            *self._copy_collectives(chosen * w),
            Collective("all_gather", "tp", self._by_sp(chosen * _INT64)[0], "forward"),
        )

    def _from_experts(self, spread: Column, tokens: Column) -> tuple[Collective, ...]:
        m, x, w = self._model, self._x, self._width
        cut = np.where(spread, 0.0, x.gathered * m.hidden_dim * w)
        behind = m.moe is not None and m.moe.shared_ffn_dim > 0  # the shared experts keep tensors after it
        return (
            *self._expert_exchange(spread, tokens * m.hidden_dim * w),
            *self._row_collectives(cut, in_recompute=behind),
        )

    @staticmethod
    def _expert_exchange(spread: Column, n_bytes: Column) -> tuple[Collective, ...]:
        return tuple(Collective("all_to_all", "ep", np.where(spread, n_bytes, 0.0), phase) for phase in _PHASES)


def padded_vocab(vocab_size: int, tp: Column) -> Column:
    """Vocabulary rows after padding to a multiple of tp: each rank holds the same number."""
    return np.ceil(vocab_size / tp) * tp


def saved_bytes(operators: tuple[Operator, ...], redone: frozenset[str] = frozenset()) -> Column | float:
    """Bytes kept for backward by these operators, without the tensors that the recomputation `redone` makes again."""
    return sum((s.n_bytes for op in operators for s in op.saved if s.redone_by not in redone or not s.redone_by), 0.0)


def _col(value: float) -> Column:
    """A size that no layout changes, as a column that broadcasts."""
    return np.asarray(float(value))
