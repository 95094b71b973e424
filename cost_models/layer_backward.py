"""What is alive while the backward of one layer runs, operator by operator, from the last to the first.

Each operator holds, beside what forward saved, the gradients that it reads and writes and what it makes on the way. As
it ends, what it saved is freed. The sizes are those of `runtime/models` and `runtime/parallel/tensor.py`; a stack with
other kernels differs by a tensor here or there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cost_models.operator_values import weight_elements
from cost_models.operators import ALLGATHER, RING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cost_models.layout import Column
    from cost_models.model import ModelSpec
    from cost_models.operator_values import Operator
    from cost_models.operators import Shapes

_FP32 = 4
# Rows of routed tokens that runtime/models/activations.py multiplies in full precision at a time.
_ROWS = 1024.0


@dataclass(frozen=True, slots=True)
class Instant:
    """The fullest moment of one operator's backward.

    Attributes:
        alive: bytes of the layer: saved tensors that are left, gradients of activations, scratch.
        fetched: the same where saved tensors come from the host one by one, as they are read.
        waiting: bytes that wait by then for weight gradients that come later.
        made: elements of weight gradients of the running unit made by then.
        making: elements of those of the running operator among them.
        unit: the experts are a unit of their own: `layer` before or without them, `experts`, `behind`.
    """

    alive: Column
    fetched: Column
    waiting: Column
    made: Column
    making: Column
    unit: str


@dataclass(frozen=True, slots=True)
class LayerBackward:
    """One layer.

    Attributes:
        saved: bytes that are there when its backward begins.
        routed: those of them that experts saved.
        instants: in order.
        deferred: bytes that wait for its weight gradients when those come later: what its products read, and gradients.
        behind_experts: bytes alive as the experts' backward ends.
        product: bytes that forward holds at its end beside what it saved.
        running: bytes that a forward that saves nothing but its input holds beside that.
    """

    saved: Column
    routed: Column
    instants: tuple[Instant, ...]
    deferred: Column
    behind_experts: Column
    product: Column
    running: Column


class BackwardOfLayer:
    """Follows the operators of a layer.

    Args:
        width: bytes of an activation.
        statistics_bytes: softmax statistics a token and head that attention's backward makes of what is kept.
    """

    def __init__(self, model: ModelSpec, shapes: Shapes, width: int, statistics_bytes: float = 0.0) -> None:
        self._m, self._x, self._width, self._statistics = model, shapes, width, statistics_bytes
        self._own = shapes.sharded * model.hidden_dim * width
        self._full = shapes.gathered * model.hidden_dim * width
        gathers = (shapes.sp == 1) & (shapes.tp > 1)
        self._again = np.where(gathers, self._full, 0.0)
        self._reduced = np.where(gathers, self._own, 0.0)

    def follow(self, operators: tuple[Operator, ...], redone: frozenset[str]) -> LayerBackward:
        """Instants of a layer whose `redone` tensors are made again one by one as they are read."""
        kept = {
            op.name: sum((s.n_bytes for s in op.saved if not s.redone_by or s.redone_by not in redone), 0.0)
            for op in operators
        }
        weights = {op.name: weight_elements(op) for op in operators}
        left: Column = np.asarray(sum(kept.values(), 0.0))
        saved, made, before = left, np.asarray(0.0), np.asarray(0.0)
        instants: list[Instant] = []
        behind: Column = np.asarray(0.0)
        unit, waiting = "layer", np.asarray(0.0)
        for name, frees, scratch in self._steps(operators, redone):
            if name == "experts_down":
                unit, before, made = "experts", made, np.asarray(0.0)
            if name == "experts_end":
                behind, unit, made = left + self._own + scratch, "behind", before
                continue
            making = np.asarray(weights.get(name, 0.0))
            made = made + making
            read = sum((kept[op] for op in (frees or _reads(name, operators))), 0.0)
            here = self._own + scratch
            instants.append(Instant(left + here, read + here, waiting, made, making, unit))
            waiting = waiting + self._waits(name)
            left = left - sum((kept[op] for op in frees), 0.0)
        product, running = self._forward(sparse="experts_up" in kept)
        routed = np.asarray(kept.get("experts_up", 0.0) + kept.get("expert_activation", 0.0))
        return LayerBackward(saved, routed, tuple(instants), waiting, behind, product, running)

    def _waits(self, name: str) -> Column | float:
        """What an operator leaves for its weight gradient: its input, and the gradient of its output, both gathered
        again where that is done late.
        """
        m, x, w = self._m, self._x, self._width
        heads, kv_heads = m.n_heads / x.tp, m.attention_kv_heads / x.tp
        projections = 2 if m.gated_mlp else 1
        shared = m.moe.shared_ffn_dim if m.moe else 0
        if name == "attention_out":
            return x.gathered * heads * m.v_head_dim * w + self._full
        if name == "qkv":
            return self._own + x.gathered * (heads * m.qk_head_dim + kv_heads * (m.qk_head_dim + m.v_head_dim)) * w
        if name in {"mlp_down", "shared_mlp_down"}:
            return x.gathered * ((shared if name.startswith("shared") else m.ffn_dim) / x.tp) * w + self._full
        if name in {"mlp_up", "shared_mlp_up"}:
            wide = x.gathered * ((shared if name.startswith("shared") else m.ffn_dim) / x.tp) * w
            return self._own + projections * wide
        if name == "experts_down":
            return sum(self._rows())
        if name == "experts_up":
            moved, wide = self._rows()
            return moved + projections * wide
        return 0.0

    def _forward(self, *, sparse: bool) -> tuple[Column, Column]:
        """At the last product of the MLP, whose operands its callers still hold."""
        if not sparse:
            wide = self._x.gathered * (self._m.ffn_dim / self._x.tp) * self._width
            product = self._full + self._reduced
            return product, 2 * self._own + (3 if self._m.gated_mlp else 2) * wide + product
        moved, wide = self._rows()
        return moved, 2 * self._own + self._again + 2 * moved + (3 if self._m.gated_mlp else 2) * wide

    def _rows(self) -> tuple[Column, Column]:
        """Routed rows as hidden states, and as wide as an expert."""
        x, moe = self._x, self._m.moe
        assert moe is not None  # noqa: S101 - the caller saw experts
        spread = x.ep > 1
        rows = np.where(spread, x.sharded, x.gathered) * moe.top_k
        wide = rows * np.where(spread, moe.ffn_dim, moe.ffn_dim / x.tp)
        return rows * self._m.hidden_dim * self._width, wide * self._width

    def _steps(
        self, operators: tuple[Operator, ...], redone: frozenset[str]
    ) -> Iterator[tuple[str, tuple[str, ...], Column]]:
        """Operator, the operators whose saved tensors are freed behind it, and its scratch."""
        names = {op.name for op in operators}
        if "experts_up" in names:
            yield from self._routed(redone)
        else:
            yield from self._mlp("mlp", self._m.ffn_dim, redone)
        yield "mlp_norm", ("mlp_norm",), self._own + self.norm_scratch(self._own)
        yield from self._attention(names, redone)
        yield "attention_norm", ("attention_norm",), self._own + self.norm_scratch(self._own)

    def _mlp(self, name: str, ffn_dim: int, redone: frozenset[str]) -> Iterator[tuple[str, tuple[str, ...], Column]]:
        wide = self._x.gathered * (ffn_dim / self._x.tp) * self._width
        projections = 2 if self._m.gated_mlp else 1
        remade = wide if "activation" in redone else 0.0
        yield f"{name}_down", (), self._again + wide + remade
        # The activation's own input, its gradient, and the gradient that it was given.
        activated = wide if "activation" not in redone else 0.0
        yield f"{name}_activation", (f"{name}_activation",), (1 + projections) * wide - activated
        yield f"{name}_up", (f"{name}_up",), projections * wide + self._column(self._full, redone)

    def _column(self, read: Column, redone: frozenset[str]) -> Column:
        """Backward of a column-parallel layer: input gathered again, its gradient, and that summed and scattered."""
        gathers = (self._x.sp == 1) & (self._x.tp > 1)
        remade = self._own if "norm" in redone else 0.0
        return read + np.where(gathers, read + self._own, 0.0) + remade

    def norm_scratch(self, read: Column) -> Column:
        """Backward of a norm beside the gradient that it is given: copies in full precision, or the result alone."""
        if self._m.norm == "layernorm":
            return read
        if self._width == _FP32:
            return read
        return read * (2 * _FP32 / self._width)

    def _routed(self, redone: frozenset[str]) -> Iterator[tuple[str, tuple[str, ...], Column]]:
        m, x, w, moe = self._m, self._x, self._width, self._m.moe
        assert moe is not None  # noqa: S101 - the caller saw its operators
        if moe.shared_ffn_dim:
            yield from self._mlp("shared_mlp", moe.shared_ffn_dim, redone)
        spread = x.ep > 1
        moved, wide = self._rows()
        rows = moved / (m.hidden_dim * w)
        projections = 2 if m.gated_mlp else 1
        # Rows travel back as they came: the gradient, what arrives, and its order by expert.
        yield "combine", (), np.where(spread, 3 * moved, moved + self._again)
        remade = wide if "activation" in redone else 0.0
        yield "experts_down", (), moved + wide + remade
        activated = wide if "activation" not in redone else 0.0
        some = np.minimum(rows, _ROWS) / rows * wide * (projections + 1) * _FP32 / w
        scratch = projections * wide + np.maximum(wide, some)
        yield "expert_activation", ("expert_activation",), scratch - activated
        yield "experts_up", ("experts_up",), projections * wide + moved
        yield "experts_end", (), moved
        yield "routed", (), np.where(spread, 3 * moved, moved + 2 * self._full)
        yield "router", ("router",), 3 * self._own

    def _attention(self, names: set[str], redone: frozenset[str]) -> Iterator[tuple[str, tuple[str, ...], Column]]:
        m, x, w = self._m, self._x, self._width
        heads, kv_heads = m.n_heads / x.tp, m.attention_kv_heads / x.tp
        query = x.gathered * heads * m.qk_head_dim * w
        output = x.gathered * heads * m.v_head_dim * w
        pair = x.gathered * kv_heads * (m.qk_head_dim + m.v_head_dim) * w
        yield "attention_out", (), self._again + output
        statistics = x.gathered * heads * self._statistics
        yield "attention", ("attention",), output + query + statistics + self._keys(query, pair)
        rotated = x.gathered * heads * (m.mla.qk_rope_head_dim if m.mla else m.head_dim)
        flows = query + pair
        if "rope" in names:
            yield "rope", (), flows + rotated * (w + _FP32)
        if "qk_norm" in names:
            yield "qk_norm", ("qk_norm",), flows + self.norm_scratch(query)
        if m.mla:
            yield "latent_up", ("latent_up",), flows + self._column(self._full, redone)
            yield "latent_down", ("latent_down", "latent_norm"), self._column(self._own, redone)
        else:
            yield "qkv", ("qkv",), flows + self._column(self._full, redone)

    def _keys(self, query: Column, pair: Column) -> Column:
        """Keys and values with their gradients: own ones, or all that are gathered or passed on with their sums.

        The last of 2 cp chunks attends to all others, whose gradients are made before they are added.
        """
        kind, parts = self._x.cp_kind, self._x.cp
        whole = pair * parts
        gathered = 2 * whole + query / 2 + whole * (2 * parts - 1) / (2 * parts)
        passed = whole + np.maximum(2 * pair + query / 2 + pair / 2, 0.75 * whole)
        return np.where(kind == ALLGATHER, gathered, np.where(kind == RING, passed, pair))


def _reads(name: str, operators: tuple[Operator, ...]) -> tuple[str, ...]:
    """Whose saved tensors a row-parallel product reads: those of the operator before it."""
    names = [op.name for op in operators]
    return (names[names.index(name) - 1],) if name in names else ()
