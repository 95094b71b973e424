"""The loss equals cross entropy over the whole logits, whatever the chunks and the padding of the vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from runtime.models.loss import LossShape, token_loss
from runtime.parallel.tensor import TensorParallel

TOKENS, HIDDEN, VOCABULARY = 24, 16, 37


def inputs(rows: int = VOCABULARY, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = scale * torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.zeros(rows, HIDDEN)
    weight[:VOCABULARY] = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("chunk", [1, 5, 24, 1024])
@pytest.mark.parametrize("rows", [VOCABULARY, 40])
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_the_loss_is_cross_entropy(chunk: int, rows: int, scale: float) -> None:
    hidden, weight, labels = inputs(rows, scale)
    found = token_loss(hidden, weight, labels, LossShape(TensorParallel(), VOCABULARY, 1 / TOKENS, chunk))
    wanted = F.cross_entropy(hidden @ weight[:VOCABULARY].t(), labels)
    torch.testing.assert_close(found, wanted)
    ours = torch.autograd.grad(found, (hidden, weight))
    stock = torch.autograd.grad(wanted, (hidden, weight))
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_rows_of_padding_get_no_gradient() -> None:
    hidden, weight, labels = inputs(64)
    token_loss(hidden, weight, labels, LossShape(TensorParallel(), VOCABULARY, 1.0)).backward()
    assert weight.grad is not None
    assert not weight.grad[VOCABULARY:].any()
    assert weight.grad[:VOCABULARY].any()


def test_the_gradient_that_arrives_scales() -> None:
    hidden, weight, labels = inputs()
    shape = LossShape(TensorParallel(), VOCABULARY, 0.5)
    once = torch.autograd.grad(token_loss(hidden, weight, labels, shape), hidden)[0]
    thrice = torch.autograd.grad(3 * token_loss(hidden, weight, labels, shape), hidden)[0]
    torch.testing.assert_close(thrice, 3 * once)


def test_without_gradients_none_are_made() -> None:
    hidden, weight, labels = inputs()
    with torch.no_grad():
        found = token_loss(hidden, weight, labels, LossShape(TensorParallel(), VOCABULARY, 1.0))
    torch.testing.assert_close(found, F.cross_entropy(hidden @ weight.t(), labels, reduction="sum").detach())
