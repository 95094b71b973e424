"""Tensor and sequence parallelism: linear layers cut by columns or rows, the embedding cut by vocabulary.

Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2) with its saving: under sequence parallelism a column-parallel
layer keeps its sharded input and gathers it again in backward, while the gradient of the input is computed.
Tokens are rows, shape (tokens, hidden), sequence first: a gather along rows is then a gather along the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from runtime.autograd import apply, apply_talking

from .collectives import (
    gather_rows,
    gather_rows_later,
    scatter_sum,
    scatter_sum_later,
    sum_over,
    sum_over_later,
)
from .weight_gradients import WeightGradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.nn import Parameter


@dataclass(frozen=True, slots=True, eq=False)
class TensorParallel:
    """What a layer needs to know of its tp group.

    Attributes:
        group: None for tp 1.
        rank, size: place in the group.
        sequence: tokens are sharded between tensor-parallel layers.
        gradients: where weight gradients are delivered.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence: bool = False
    gradients: WeightGradients | None = None

    def apply(self, function: type[torch.autograd.Function], *arguments: Any) -> Any:  # noqa: ANN401 - an operator's
        """Run an operator that talks to this group, if there is one."""
        return (apply if self.group is None else apply_talking)(function, *arguments)

    def gather(self, x: Tensor) -> Tensor:
        """All tokens; without sequence parallelism they are here."""
        return gather_rows(x, self.group) if self.group is not None and self.sequence else x

    def gather_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to gather all tokens."""
        return gather_rows_later(x, self.group) if self.group is not None and self.sequence else lambda: x

    def reduce(self, x: Tensor) -> Tensor:
        """Sum of all ranks' parts: this rank's tokens of it, or all."""
        if self.group is None:
            return x
        return scatter_sum(x, self.group) if self.sequence else sum_over(x, self.group)

    def reduce_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Start the sum."""
        if self.group is None:
            return lambda: x
        return scatter_sum_later(x, self.group) if self.sequence else sum_over_later(x, self.group)


def column_linear(
    x: Tensor, weights: Sequence[Parameter], biases: Sequence[Parameter | None], tp: TensorParallel
) -> tuple[Tensor, ...]:
    """Linear layers that read the same tokens, their outputs cut over the group.

    Args:
        x: (own tokens, inputs).
        weights: each (outputs / tp, inputs).

    Returns:
        One (all tokens, outputs / tp) for each weight.
    """
    out: tuple[Tensor, ...] = tp.apply(_ColumnLinear, x, tp, len(weights), *weights, *biases)
    return out


def row_linear(x: Tensor, weight: Parameter, bias: Parameter | None, tp: TensorParallel) -> Tensor:
    """A linear layer whose input is cut over the group.

    Args:
        x: (all tokens, inputs / tp).
        weight: (outputs, inputs / tp).
        bias: whole on each rank, added once after the sum.

    Returns:
        (own tokens, outputs).
    """
    if tp.group is None and torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    held = _Held()
    out: Tensor = tp.apply(_RowLinear, tp.apply(_HoldInput, x, held), weight, bias, tp, held)
    return out


def copy_to_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Own tokens to all tokens; the gradient is the sum over ranks, each of which holds a part of it."""
    if tp.group is None:
        return x
    out: Tensor = tp.apply(_CopyToRegion, x, tp)
    return out


def reduce_from_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Parts of all tokens to the sum of own tokens."""
    if tp.group is None:
        return x
    out: Tensor = tp.apply(_ReduceFromRegion, x, tp)
    return out


def vocabulary_embedding(tokens: Tensor, weight: Parameter, tp: TensorParallel) -> Tensor:
    """Look tokens up in a table cut by rows.

    Args:
        tokens: (all tokens,) integers.
        weight: (vocabulary / tp, hidden).

    Returns:
        (own tokens, hidden).
    """
    out: Tensor = tp.apply(_VocabularyEmbedding, tokens, weight, tp)
    return out


def weight_gradient(output_gradient: Tensor, read: Tensor) -> Tensor:
    """(outputs, inputs) from (tokens, outputs) and (tokens, inputs)."""
    return output_gradient.t() @ read


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, n: int, *tensors: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
        weights, biases = tensors[:n], tensors[n:]
        read = tp.gather(x)
        ctx.save_for_backward(x, *weights)
        ctx.tp, ctx.weights, ctx.biases = tp, weights, biases
        return tuple(F.linear(read, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        x, *weights = ctx.saved_tensors
        tp, biases, parameters = ctx.tp, ctx.biases, ctx.weights
        later = tp.gradients is not None and tp.gradients.deferring
        read = None if later else tp.gather_later(x)
        dx = gradients[0] @ weights[0]
        for g, w in zip(gradients[1:], weights[1:], strict=True):
            dx.addmm_(g, w)
        reduced = tp.reduce_later(dx)
        given: list[Tensor | None] = [None] * (2 * len(weights))
        if read is None:
            held = x.detach()  # a saved tensor knows the nodes behind it, down to the input of the stage
            tp.gradients.defer(lambda: _deliver_columns(tp, held, gradients, parameters, biases))
        else:
            given = _gradients_of(gradients, read(), biases)
        return (reduced(), None, None, *given)


def _gradients_of(gradients: Sequence[Tensor], read: Tensor, biases: Sequence[object]) -> list[Tensor | None]:
    weights: list[Tensor | None] = [weight_gradient(g, read) for g in gradients]
    return weights + [g.sum(0) if b is not None else None for g, b in zip(gradients, biases, strict=True)]


def _deliver_columns(
    tp: TensorParallel,
    x: Tensor,
    gradients: Sequence[Tensor],
    weights: Sequence[Parameter],
    biases: Sequence[Parameter | None],
) -> None:
    assert tp.gradients is not None  # noqa: S101 - only a deferring store gets here
    found = _gradients_of(gradients, tp.gather(x), biases)
    for parameter, gradient in zip((*weights, *biases), found, strict=True):
        if parameter is not None and gradient is not None:
            tp.gradients.deliver(parameter, gradient)


@dataclass(slots=True, eq=False)
class _Held:
    """Where an operator's backward finds what the node before it keeps."""

    node: Any = None


class _HoldInput(torch.autograd.Function):
    """Keeps the input of a row-parallel layer, before the layer runs.

    An operator's own saved tensors are noted when its forward is done. The last one of a layer ends what full
    recomputation runs again: noted here, the down projection and its message are not repeated.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: _Held) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x)
        held.node = ctx
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return g, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        tp: TensorParallel,
        held: _Held,
    ) -> Tensor:
        ctx.tp, ctx.weight, ctx.bias, ctx.held = tp, weight, bias, held
        if tp.group is None:
            return F.linear(x, weight, bias)
        out = tp.reduce(F.linear(x, weight))
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        (x,) = ctx.held.node.saved_tensors
        tp, weight, bias = ctx.tp, ctx.weight, ctx.bias
        whole = tp.gather(g)
        dx = whole @ weight
        bias_gradient = None if bias is None else g.sum(0)
        if tp.gradients is not None and tp.gradients.deferring:
            held = x.detach()
            tp.gradients.defer(lambda: tp.gradients.deliver(weight, weight_gradient(whole, held)))
            return dx, None, bias_gradient, None, None
        return dx, weight_gradient(whole, x), bias_gradient, None, None


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:  # noqa: ANN401
        ctx.tp = tp
        return tp.gather(x) if tp.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        # Without sp the sum is in place: autograd may hand the same gradient to others, so it gets a copy.
        return ctx.tp.reduce(g if ctx.tp.sequence else g.clone()), None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:  # noqa: ANN401
        ctx.tp = tp
        return tp.reduce(x if tp.sequence else x.clone())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return ctx.tp.gather(g), None


class _VocabularyEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Parameter, tp: TensorParallel) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(tokens)
        ctx.tp, ctx.rows, ctx.dtype = tp, weight.shape, weight.dtype
        if tp.group is None:
            return F.embedding(tokens, weight)
        own, outside = _own_rows(tokens, weight.shape[0], tp)
        found = F.embedding(own, weight).masked_fill_(outside[:, None], 0.0)
        return tp.reduce(found)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None]:  # noqa: ANN401
        (tokens,) = ctx.saved_tensors
        tp, whole = ctx.tp, ctx.tp.gather(g)
        out = whole.new_zeros(ctx.rows)
        if tp.group is None:
            return None, out.index_add_(0, tokens, whole), None
        own, outside = _own_rows(tokens, ctx.rows[0], tp)
        return None, out.index_add_(0, own, whole.masked_fill(outside[:, None], 0.0)), None


def _own_rows(tokens: Tensor, rows: int, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Row of this rank's table for each token (0 where it is another rank's), and whether it is another's."""
    own = tokens - tp.rank * rows
    outside = (own < 0) | (own >= rows)
    return own.masked_fill(outside, 0), outside
