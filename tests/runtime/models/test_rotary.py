"""The rotary embedding turns pairs of numbers as complex multiplication does, whatever positions a rank holds."""

from __future__ import annotations

import pytest
import torch

from runtime.models.rotary import RotaryTable, rotate


def turned_by_complex_numbers(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x (sequence, batch, heads, width): halves are real and imaginary part."""
    half = x.shape[-1] // 2
    angles = positions.double()[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half].double(), x[..., half:].double())
    z = z * torch.exp(1j * angles)[:, None, None]
    return torch.cat((z.real, z.imag), -1).to(x.dtype)


@pytest.mark.parametrize("positions", [torch.arange(6), torch.tensor([0, 1, 10, 11]), torch.tensor([100_000])])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotation_is_complex_multiplication(positions: torch.Tensor, theta: float) -> None:
    x = torch.randn(len(positions), 2, 3, 8, generator=torch.Generator().manual_seed(0))
    found = rotate(x, RotaryTable(positions, 8, theta))
    torch.testing.assert_close(found, turned_by_complex_numbers(x, positions, theta))


def test_backward_turns_back() -> None:
    x = torch.randn(5, 1, 2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    table = RotaryTable(torch.arange(5), 8, 10000.0)
    (back,) = torch.autograd.grad(rotate(x, table), x, rotate(x.detach(), table))
    torch.testing.assert_close(back, x.detach())  # the gradient of a turned x is x: the transpose undoes the turn


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = (torch.randn(1, 1, 1, 16, generator=torch.Generator().manual_seed(s)) for s in (0, 1))

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned = [rotate(x, RotaryTable(torch.tensor([p]), 16, 10000.0)) for x, p in ((q, at_q), (k, at_k))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=1e-4, atol=1e-5)
