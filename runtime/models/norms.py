"""Norms that keep their input and one statistic a row, and no copy in full precision.

On NPUs the fused kernels npu_rms_norm and npu_rms_norm_backward (Ascend Extension for PyTorch) compute the same: they
return and take the inverse of the root mean square, in full precision, so that what is kept is the same everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from runtime.autograd import apply

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Norm(nn.Module):
    """RMSNorm or LayerNorm of the last axis."""

    def __init__(self, width: int, epsilon: float, kind: str = "rmsnorm") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if kind == "layernorm" else None
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Shape (..., width) to the same."""
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
        out: Tensor = apply(_RmsNorm, x, self.weight, self.epsilon)
        return out


class _RmsNorm(torch.autograd.Function):
    """y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + epsilon), as in Zhang and Sennrich 2019 (arXiv:1910.07467)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:  # noqa: ANN401
        if (fused := _fused(x)) is not None:
            out, rstd = fused.npu_rms_norm(x, weight.to(x.dtype), epsilon)
        else:
            rstd = inverse_rms(x, epsilon)
            out = scaled(x, rstd, weight)
        ctx.save_for_backward(x, rstd, weight)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        x, rstd, weight = ctx.saved_tensors
        if (fused := _fused(x)) is not None:
            dx, weight_gradient = fused.npu_rms_norm_backward(g, x, weight.to(x.dtype), rstd)
            return dx, weight_gradient.to(weight.dtype), None
        wide_weight = weight.float()
        product = g.float() * x
        weight_gradient = rstd.flatten() @ product.flatten(0, -2)
        # d/dx of x * rstd: rstd * (g w) - x * rstd^3 * mean(g w x). Sums over rows and columns are products of matrix
        # and vector, so that one tensor of the size of x is made in full precision, not four.
        mean = (product @ wide_weight)[..., None] * rstd.pow(3).div_(x.shape[-1])
        dx = torch.mul(g, wide_weight, out=product).mul_(rstd)
        return dx.addcmul_(x, mean, value=-1.0).to(x.dtype), weight_gradient.to(weight.dtype), None


def _fused(x: Tensor) -> Any:  # noqa: ANN401 - operators that torch_npu registers
    return torch.ops.npu if x.device.type == "npu" else None


def inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x^2) + epsilon) of each row in full precision, shape (..., 1)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


def scaled(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """The output of RMSNorm from its input and statistic, in the dtype of the input."""
    return (x * rstd).mul_(weight).to(x.dtype)


def again(output: Tensor) -> Callable[[], Tensor]:
    """How to make an RMSNorm's or LayerNorm's output again from what its backward keeps."""
    node = output.grad_fn
    return lambda: _again(node)


def _again(node: Any) -> Tensor:  # noqa: ANN401 - a node of autograd has no public type
    if hasattr(node, "saved_tensors"):
        x, rstd, weight = node.saved_tensors
        return scaled(x, rstd, weight)
    x, mean, rstd = node._saved_input, node._saved_result1, node._saved_result2
    normed = (x.float() - mean) * rstd * node._saved_weight + node._saved_bias
    return normed.to(x.dtype)
