"""Output projection and cross entropy in one: logits of a few tokens at a time, gradients made while they are there.

Whole logits in full precision are the largest tensor of a step (Korthikanti et al. 2022, section 4.3). Here a chunk's
logits are reduced to its loss and to the gradients of hidden states and weight before the next chunk's are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from runtime.parallel.tensor import TensorParallel

CHUNK_TOKENS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class LossShape:
    """What the loss needs besides its inputs.

    Attributes:
        vocab_size: rows of the vocabulary that are real; those behind are padding.
        scale: factor of each token's loss.
    """

    tp: TensorParallel
    vocab_size: int
    scale: float
    chunk_tokens: int = CHUNK_TOKENS


def token_loss(hidden: Tensor, weight: Parameter, labels: Tensor, shape: LossShape) -> Tensor:
    """Scaled sum of the tokens' cross entropy.

    Args:
        hidden: (own tokens, hidden).
        weight: (vocabulary / tp, hidden).
        labels: (all tokens,).

    Returns:
        A number in full precision, equal on all tp ranks.
    """
    out: Tensor = shape.tp.apply(_TokenLoss, hidden, weight, labels, shape)
    return out


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, shape: LossShape) -> Tensor:  # noqa: ANN401
        tp = shape.tp
        whole = tp.gather(hidden)
        wanted = any(ctx.needs_input_grad[:2])
        hidden_gradient = torch.empty_like(whole) if wanted else None
        weight_gradient = torch.zeros_like(weight) if wanted else None
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        for start in range(0, whole.shape[0], shape.chunk_tokens):
            rows = slice(start, start + shape.chunk_tokens)
            loss, slope = _chunk_loss(whole[rows] @ weight.t(), labels[rows], shape)
            total += loss
            if hidden_gradient is not None and weight_gradient is not None:
                torch.mm(slope, weight, out=hidden_gradient[rows])
                weight_gradient.addmm_(slope.t(), whole[rows])
            del slope  # or it would be there while the next chunk's are made
        if hidden_gradient is not None:
            ctx.save_for_backward(tp.reduce(hidden_gradient), weight_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient.mul_(g), weight_gradient.mul_(g), None, None


def _chunk_loss(products: Tensor, labels: Tensor, shape: LossShape) -> tuple[Tensor, Tensor]:
    """Scaled loss of a chunk, and its gradient by the logits in their own dtype; both are made in full precision."""
    logits = products.float()
    dtype = products.dtype
    del products
    tp = shape.tp
    first = tp.rank * logits.shape[1]
    padding = first + logits.shape[1] - shape.vocab_size
    if padding > 0:
        logits[:, max(logits.shape[1] - padding, 0) :] = float("-inf")
    highest = logits.amax(1)
    if tp.group is not None:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=tp.group)
    own = labels - first
    mine = (own >= 0) & (own < logits.shape[1])
    own = own.masked_fill(~mine, 0)[:, None]
    logits -= highest[:, None]
    target = logits.gather(1, own)[:, 0].masked_fill_(~mine, 0.0)
    probabilities = logits.exp_()
    sums = torch.stack((probabilities.sum(1), target))
    if tp.group is not None:
        dist.all_reduce(sums, group=tp.group)
    loss = (sums[0].log() - sums[1]).sum() * shape.scale
    probabilities.mul_((shape.scale / sums[0])[:, None])
    probabilities.scatter_add_(1, own, mine.to(probabilities.dtype)[:, None] * -shape.scale)
    return loss, probabilities.to(dtype)
