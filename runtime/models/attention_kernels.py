"""Fused attention of each kind of device behind one interface: output and softmax statistics, and the way back.

Shapes are (batch, heads, sequence, width); key/value heads may be fewer than query heads and are never repeated in what
is kept. Statistics are the log of the softmax's denominator, (batch, heads, sequence), in full precision.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    from torch import Tensor

Gradients = tuple["Tensor", "Tensor", "Tensor"]


class Kept(NamedTuple):
    """What forward was given and made, for the way back."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    statistics: Tensor


class AttentionKernel(Protocol):
    """One device's fused attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output, shape of q with the width of v, and statistics.

        Args:
            causal: query i sees keys 0 to i; query and key sequences are equally long then.
            bias: (1 or heads, queries, keys), added to the scores; minus infinity hides a key.
        """
        ...

    def backward(self, g: Tensor, kept: Kept, *, causal: bool, bias: Tensor | None) -> Gradients:
        """Gradients of q, k and v for the gradient `g` of the output; `causal` and `bias` as forward had them."""
        ...


class CpuKernel:
    """The blocked kernel of PyTorch's CPU build. It wants heads of equal width for q, k and v: v is padded for it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """See AttentionKernel."""
        out, statistics = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, _widened(v, q), 0.0, causal, attn_mask=_mask(bias, q), scale=_scale(q)
        )
        return out[..., : v.shape[-1]], statistics

    def backward(self, g: Tensor, kept: Kept, *, causal: bool, bias: Tensor | None) -> Gradients:
        """See AttentionKernel."""
        q, k, v, out, statistics = kept
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _widened(g, q),
            q,
            k,
            _widened(v, q),
            _widened(out, q),
            statistics,
            0.0,
            causal,
            attn_mask=_mask(bias, q),
            scale=_scale(q),
        )
        return dq, dk, dv[..., : v.shape[-1]]


class CudaKernel:
    """Flash attention of PyTorch's CUDA build, or its memory-efficient kernel where a bias is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """See AttentionKernel."""
        groups = q.shape[1] // k.shape[1]
        found = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, _repeated(k, groups), _repeated(v, groups), _mask(bias, q), True, 0.0, causal, scale=_scale(q)
        )
        return found[0], found[1][..., : q.shape[2]]

    def backward(self, g: Tensor, kept: Kept, *, causal: bool, bias: Tensor | None) -> Gradients:
        """See AttentionKernel. Seed and offset of the dropout that is not used are zeros."""
        q, k, v, out, statistics = kept
        groups = q.shape[1] // k.shape[1]
        seed = torch.zeros((), dtype=torch.int64)
        # The kernel wants its statistics padded to 32 queries, as its forward returned them.
        padded = F.pad(statistics, (0, -statistics.shape[-1] % 32), value=math.inf)
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            g,
            q,
            _repeated(k, groups),
            _repeated(v, groups),
            _mask(bias, q),
            out,
            padded,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            causal,
            scale=_scale(q),
        )
        return dq, _summed(dk, groups), _summed(dv, groups)


class NpuKernel:
    """npu_fusion_attention of torch_npu (docs: Ascend Extension for PyTorch), layout BNSD.

    Its statistics are softmax maximum and sum, 8 equal values each a row. One number says the same: exp(score -
    maximum) / sum is exp(score - m) / 1 with m = maximum + log(sum), so 1/16 of the bytes are kept.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """See AttentionKernel."""
        out, maximum, total, *_ = torch.ops.npu.npu_fusion_attention(
            q, k, v, q.shape[1], "BNSD", scale=_scale(q), **_npu_mask(q, causal=causal, bias=bias)
        )
        return out, maximum[..., 0] + total[..., 0].log()

    def backward(self, g: Tensor, kept: Kept, *, causal: bool, bias: Tensor | None) -> Gradients:
        """See AttentionKernel."""
        q, k, v, out, statistics = kept
        maximum = statistics[..., None].expand(*statistics.shape, 8).contiguous()
        total = torch.ones_like(maximum)
        dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
            q,
            k,
            v,
            g,
            q.shape[1],
            "BNSD",
            softmax_max=maximum,
            softmax_sum=total,
            attention_in=out,
            scale_value=_scale(q),
            **_npu_mask(q, causal=causal, bias=bias),
        )
        return dq, dk, dv


def kernel_for(kind: str) -> AttentionKernel:
    """The kernel of a kind of device: `npu`, `cuda` or `cpu`."""
    kinds: dict[str, type[NpuKernel | CudaKernel | CpuKernel]] = {"npu": NpuKernel, "cuda": CudaKernel}
    return kinds.get(kind, CpuKernel)()


_COMPRESSED_MASK = 2048


def _npu_mask(q: Tensor, *, causal: bool, bias: Tensor | None) -> dict[str, object]:
    """Causal runs on the kernel's compressed triangle (sparse mode 2), which it tiles over any length."""
    if bias is not None:
        return {"pse": bias.to(q.dtype)[None]}
    if not causal:
        return {}
    return {"atten_mask": _triangle(q.device), "sparse_mode": 2}


@lru_cache(maxsize=1)
def _triangle(device: torch.device) -> Tensor:
    """Made once: 4 MiB a call would be more than what a small layer keeps."""
    return torch.ones(_COMPRESSED_MASK, _COMPRESSED_MASK, dtype=torch.bool, device=device).triu_(1)


def _scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def _mask(bias: Tensor | None, q: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(q.dtype)[None].expand(q.shape[0], q.shape[1], -1, -1)


def _widened(x: Tensor, like: Tensor) -> Tensor:
    short = like.shape[-1] - x.shape[-1]
    return F.pad(x, (0, short)) if short else x


def _repeated(x: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return x
    batch, heads, sequence, width = x.shape
    return x[:, :, None].expand(batch, heads, groups, sequence, width).reshape(batch, heads * groups, sequence, width)


def _summed(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)
