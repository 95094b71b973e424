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


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Turn the halves of each head against each other, as Llama's weights on Hugging Face are laid out.

    Args:
        x: (sequence, micro batch, heads, width).
    """
    out: Tensor = apply(_Rotate, x, table)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: RotaryTable) -> Tensor:  # noqa: ANN401
        ctx.table = table
        return _turned(x, table.cos, table.sin)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _turned(g, ctx.table.cos, -ctx.table.sin), None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = x * cos  # in full precision, as the angles are
    first, second = x.chunk(2, -1)
    low, high = out.chunk(2, -1)
    low.addcmul_(second, sin, value=-1.0)
    high.addcmul_(first, sin)
    return out.to(x.dtype)
