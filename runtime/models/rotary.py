"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): linear, so backward turns back and keeps nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from runtime.autograd import apply

if TYPE_CHECKING:
    from torch import Tensor


class RotaryTable:
    """Cosines and sines of the positions that this rank holds.

    Args:
        positions: (tokens of a sequence on this rank,), absolute.
        width: rotated width of a head, even.
        theta: the slowest angle turns by about 1 / theta a token.
    """

    def __init__(self, positions: Tensor, width: int, theta: float) -> None:
        exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
        angles = positions.double()[:, None] * theta**-exponents
        # (sequence, 1 micro batch, 1 head, width) and (..., width / 2): both halves turn by the same angles.
        self.cos = angles.cos().float().repeat(1, 2)[:, None, None, :]
        self.sin = angles.sin().float()[:, None, None, :]


def rotate(x: Tensor, table: RotaryTable, *, by_head: bool = False) -> Tensor:
    """Turn the halves of each head against each other, as Llama's weights on Hugging Face are laid out.

    Args:
        x: (sequence, micro batch, heads, width).
        by_head: lay the result out in memory as `in_order_of_heads` does.
    """
    out: Tensor = apply(_Rotate, x, table, by_head)
    return out


def in_order_of_heads(x: Tensor) -> Tensor:
    """The same (sequence, micro batch, heads, width) with the sequence of each head in one piece of memory.

    Attention reads all keys and values of a head again for each block of queries: on a CPU the rows of other heads
    between them cost a tenth of its time.
    """
    return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: RotaryTable, by_head: bool) -> Tensor:  # noqa: ANN401
        ctx.table = table
        return _turned(x, table.cos, table.sin, by_head=by_head)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return _turned(g, ctx.table.cos, -ctx.table.sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, *, by_head: bool = False) -> Tensor:
    sequence, batch, heads, width = x.shape
    shape = (batch, heads, sequence, width) if by_head else (sequence, batch, heads, width)
    out = torch.empty(shape, device=x.device)  # in full precision, as the angles are
    out = out.permute(2, 0, 1, 3) if by_head else out
    torch.mul(x, cos, out=out)
    first, second = x.chunk(2, -1)
    low, high = out.chunk(2, -1)
    low.addcmul_(second, sin, value=-1.0)
    high.addcmul_(first, sin)
    return out.to(x.dtype)
