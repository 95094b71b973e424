"""The CPU kernel's output, statistics and gradients equal a softmax written out."""

from __future__ import annotations

import math

import pytest
import torch

from runtime.models.attention_kernels import CpuKernel, CudaKernel, Kept, NpuKernel, kernel_for


def inputs(heads: int, kv_heads: int, queries: int, keys: int, width: int, v_width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, queries, width), (2, kv_heads, keys, width), (2, kv_heads, keys, v_width))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and the log of the softmax's denominator, by the definition and in double precision."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    if bias is not None:
        scores = scores + bias
    return (scores.softmax(-1) @ v).float(), scores.logsumexp(-1).float()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("width", "v_width"), [(16, 16), (24, 16)])
@pytest.mark.parametrize("mask", ["none", "causal", "bias", "bias of each head"])
def test_the_cpu_kernel_is_a_softmax(heads: int, kv_heads: int, width: int, v_width: int, mask: str) -> None:
    keys = 12 if mask == "causal" else 20
    q, k, v = inputs(heads, kv_heads, 12, keys, width, v_width)
    bias = torch.randn(heads if "head" in mask else 1, 12, keys, generator=torch.Generator().manual_seed(1))
    bias[:, :, 3] = -math.inf
    given = {"causal": mask == "causal", "bias": bias if "bias" in mask else None}
    wanted, denominators = written_out(q, k, v, **given)
    kernel, g = CpuKernel(), torch.randn(2, heads, 12, v_width, generator=torch.Generator().manual_seed(2))
    out, statistics = kernel.forward(q.detach(), k.detach(), v.detach(), **given)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(statistics, denominators, rtol=1e-4, atol=1e-5)
    found = kernel.backward(g, Kept(q.detach(), k.detach(), v.detach(), out, statistics), **given)
    for ours, right in zip(found, torch.autograd.grad(wanted, (q, k, v), g), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


def test_a_kernel_is_chosen_by_the_kind_of_device() -> None:
    kinds = {kind: type(kernel_for(kind)) for kind in ("npu", "cuda", "cpu")}
    assert kinds == {"npu": NpuKernel, "cuda": CudaKernel, "cpu": CpuKernel}
