"""The activation between an MLP's projections: keeps what it read, and computes the rest again in backward."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from runtime.autograd import apply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_ROWS = 1024
"""Rows that are multiplied in full precision at a time."""


def gated(gate: Tensor, up: Tensor, weights: Tensor | None = None) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202), each row times its weight where weights (rows,) are given."""
    out: Tensor = apply(_Gated, gate, up, weights)
    return out


def plain(up: Tensor, weights: Tensor | None = None) -> Tensor:
    """gelu(up) in its tanh form, as GPT-2 has it; rows times their weights where given."""
    out: Tensor = apply(_Plain, up, weights)
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(gate, up, weights)
        return _weighted(F.silu(gate).mul_(up), weights)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # noqa: ANN401
        gate, up, weights = ctx.saved_tensors
        activated = F.silu(gate)
        row_gradient = None if weights is None else _row_gradient(g, (activated, up), weights)
        up_gradient, gate_gradient = _weighted(activated.mul_(g), weights), _weighted(g * up, weights)
        # In place: a product of its own would be a third tensor as wide as the MLP.
        torch.ops.aten.silu_backward.grad_input(gate_gradient, gate, grad_input=gate_gradient)
        return gate_gradient, up_gradient, row_gradient


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor, weights: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(up, weights)
        return _weighted(F.gelu(up, approximate="tanh"), weights)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None]:  # noqa: ANN401
        up, weights = ctx.saved_tensors
        row_gradient = None
        if weights is not None:
            row_gradient = _row_gradient(g, (F.gelu(up, approximate="tanh"),), weights)
        return _weighted(torch.ops.aten.gelu_backward(g, up, approximate="tanh"), weights), row_gradient


def _weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows if weights is None else rows.mul_(weights[:, None])


def _row_gradient(g: Tensor, factors: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Sum over each row of g times the factors, in full precision.

    Some rows at a time: as a whole the products would be twice as many bytes as all that the activation keeps.
    """
    sums = [
        math.prod(parts, start=part.float()).sum(-1)
        for part, *parts in zip(g.split(_ROWS), *(factor.split(_ROWS) for factor in factors), strict=True)
    ]
    return torch.cat(sums).to(weights.dtype)


def again(output: Tensor) -> Callable[[], Tensor]:
    """How to make an activation's output again from what its backward keeps."""
    node = output.grad_fn
    return lambda: _again(node)


def _again(node: Any) -> Tensor:  # noqa: ANN401 - a node of autograd has no public type
    *read, weights = node.saved_tensors
    if len(read) == 2:
        return _weighted(F.silu(read[0]).mul_(read[1]), weights)
    return _weighted(F.gelu(read[0], approximate="tanh"), weights)
