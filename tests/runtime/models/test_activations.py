"""Activations equal plain formulas, forward and backward, with and without weights of their rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd import gradcheck

from runtime.models.activations import again, gated, plain


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("weighted", [False, True])
def test_gated_is_silu_of_the_gate_times_up(weighted: bool) -> None:
    gate, up, weights = tensors((5, 8), (5, 8), (5,))
    inputs = (gate, up, weights)[: 2 + weighted]
    wanted = F.silu(gate) * up * (weights[:, None] if weighted else 1)
    _same(gated(*inputs), wanted, inputs)


@pytest.mark.parametrize("weighted", [False, True])
def test_plain_is_gelu(weighted: bool) -> None:
    up, weights = tensors((5, 8), (5,))
    inputs = (up, weights)[: 1 + weighted]
    wanted = F.gelu(up, approximate="tanh") * (weights[:, None] if weighted else 1)
    _same(plain(*inputs), wanted, inputs)


def _same(found: torch.Tensor, wanted: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
    g = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found, wanted)
    for a, b in zip(torch.autograd.grad(found, inputs, g), torch.autograd.grad(wanted, inputs, g), strict=True):
        torch.testing.assert_close(a, b)


def test_finite_differences_agree() -> None:
    gate, up = tensors((3, 4), (3, 4), dtype=torch.float64)
    assert gradcheck(gated, (gate, up))
    assert gradcheck(plain, (up,))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_is_made_again_bit_by_bit(weighted: bool, dtype: torch.dtype) -> None:
    gate, up, weights = tensors((5, 8), (5, 8), (5,), dtype=dtype)
    rows = (weights,) if weighted else ()
    for out in (gated(gate, up, *rows), plain(up, *rows)):
        assert torch.equal(again(out)(), out)


def test_inputs_are_left_alone() -> None:
    gate, up, weights = tensors((5, 8), (5, 8), (5,))
    copies = [x.detach().clone() for x in (gate, up, weights)]
    out = gated(gate, up, weights)
    again(out)()
    out.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip((gate, up, weights), copies, strict=True))
