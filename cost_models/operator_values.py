"""What the operator table is made of: products, saved tensors, collectives, and the operator that has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cost_models.layout import Column

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Gemm:
    """`count` products [m, k] x [k, n]; backward is dgrad [m, n] x [n, k] and wgrad [k, m] x [m, n]."""

    m: Column
    k: Column
    n: Column
    count: Column | float = 1.0
    accumulates_weight: bool = True


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor kept for backward. `redone_by`: the selective recomputation that makes it unnecessary to keep."""

    name: str
    n_bytes: Column
    redone_by: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """A call on the group of a dimension; bytes as in collectives.py (all-gather: output, reduce-scatter: input).

    `overlapped`: runs beside the operator's own compute (ring attention), so only what exceeds it is exposed.
    `in_recompute`: a full recomputation repeats it.
    """

    kind: str
    dimension: Literal["tp", "cp", "ep"]
    n_bytes: Column
    phase: Phase
    count: Column | float = 1.0
    overlapped: bool = False
    in_recompute: bool = True


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator: what it computes, moves, keeps and says to other ranks.

    `attention_flops`: forward FLOPs of the score and value products, without the half that the kernel skips.
    `attention_backward_flops`: the scores again and four more products, of the widths of q and v (arXiv:2307.08691).
    `redone_by`: the selective recomputation that repeats this operator's forward.
    `last`: nothing that backward needs is computed by it or after it.
    """

    name: str
    gemms: tuple[Gemm, ...] = ()
    attention_flops: Column | float = 0.0
    attention_backward_flops: Column | float = 0.0
    forward_bytes: Column | float = 0.0
    backward_bytes: Column | float = 0.0
    forward_kernels: int = 1
    backward_kernels: int = 1
    saved: tuple[Saved, ...] = ()
    collectives: tuple[Collective, ...] = ()
    redone_by: str = ""
    last: bool = False


def weight_elements(operator: Operator) -> Column | float:
    """Elements of the matrices that an operator's products read."""
    return sum((g.k * g.n * g.count for g in operator.gemms if g.accumulates_weight), 0.0)
