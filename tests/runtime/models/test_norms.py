"""Norms equal torch's own, forward and backward, and are made again from what they keep."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from runtime.models import norms
from runtime.models.norms import Norm

EPSILON = 1e-5


def norm_of(kind: str, width: int, seed: int = 0) -> Norm:
    generator = torch.Generator().manual_seed(seed)
    norm = Norm(width, EPSILON, kind)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, 1.0, 0.5, generator=generator)
    return norm


def stock(norm: Norm, x: torch.Tensor) -> torch.Tensor:
    if norm.bias is None:
        return F.rms_norm(x, norm.weight.shape, norm.weight, EPSILON)
    return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, EPSILON)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("shape", [(6, 32), (4, 2, 3, 16)])
def test_a_norm_is_torchs(kind: str, shape: tuple[int, ...]) -> None:
    norm, x = norm_of(kind, shape[-1]), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    g = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    inputs = (x.requires_grad_(), *norm.parameters())
    ours, wanted = norm(x), stock(norm, x)
    torch.testing.assert_close(ours, wanted)
    for a, b in zip(torch.autograd.grad(ours, inputs, g), torch.autograd.grad(wanted, inputs, g), strict=True):
        torch.testing.assert_close(a, b)


class FusedKernels:
    """What the Ascend Extension for PyTorch documents of npu_rms_norm and its backward, by torch's own norm."""

    def npu_rms_norm(self, x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
        assert gamma.dtype == x.dtype, "the kernel takes one dtype"
        rstd = (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
        return F.rms_norm(x, gamma.shape, gamma, epsilon), rstd

    def npu_rms_norm_backward(
        self, dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert dy.dtype == x.dtype == gamma.dtype
        assert rstd.dtype == torch.float32
        assert rstd.shape == (*x.shape[:-1], 1)
        normed = x.float() * rstd
        product = dy.float() * gamma.float()
        dx = (product - normed * (product * normed).mean(-1, keepdim=True)) * rstd
        return dx.to(x.dtype), (dy.float() * normed).flatten(0, -2).sum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_kernels_take_its_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same result, gradients in the weight's own dtype, the same kept, and made again alike."""
    monkeypatch.setattr(norms, "_fused", lambda _x: FusedKernels())
    norm, x = norm_of("rmsnorm", 16).to(dtype), torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(1))
    x = x.to(dtype).requires_grad_()
    g = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    out = norm(x)
    assert [tensor.numel() for tensor in out.grad_fn.saved_tensors] == [4 * 3 * 16, 4 * 3, 16]
    made_again = norms.again(out)()
    found = torch.autograd.grad(out, (x, norm.weight), g)
    monkeypatch.undo()
    close = 1e-5 if dtype == torch.float32 else 2**-6
    own = norm(x)
    torch.testing.assert_close(out, own, rtol=close, atol=close)
    torch.testing.assert_close(made_again, own, rtol=close, atol=close)
    for a, b in zip(found, torch.autograd.grad(own, (x, norm.weight), g), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=close, atol=close)


def test_rows_of_zeros_stay_finite() -> None:
    norm, x = norm_of("rmsnorm", 8), torch.zeros(3, 8, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (norm.weight.detach() / EPSILON**0.5).expand(3, 8))


def test_in_bf16_a_norm_rounds_once_at_its_end() -> None:
    norm = norm_of("rmsnorm", 64)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    low = norm.bfloat16()
    wanted = F.rms_norm(x.float(), (64,), low.weight.float(), EPSILON).bfloat16()
    found = low(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2**-8, atol=0)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norms_output_is_made_again(kind: str, dtype: torch.dtype) -> None:
    norm = norm_of(kind, 32).to(dtype)
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    out = norm(x)
    tolerance = 0 if kind == "rmsnorm" else {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(norms.again(out)(), out, rtol=tolerance, atol=tolerance)
