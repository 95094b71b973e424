"""When linear layers compute the gradients of their weights: in backward, or later, as a zero-bubble schedule asks.

Split backward (Qi et al. 2023, arXiv:2401.10241, section 2) sends the gradient of the input on first. What is left, one
product a weight, waits here as a closure over the saved input and the output's gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Parameter


class WeightGradients:
    """The closures of one model chunk, in the order of its backward.

    Attributes:
        deferring: keep closures instead of computing at once.
        on_gradient: told of a parameter whose gradient was delivered outside autograd.
    """

    def __init__(self) -> None:
        self.deferring = False
        self.on_gradient: Callable[[Parameter], None] | None = None
        self._waiting: list[Callable[[], None]] = []

    def defer(self, work: Callable[[], None]) -> None:
        """Keep one piece of work."""
        self._waiting.append(work)

    def take(self) -> Callable[[], None]:
        """What has been kept since the last call, as one call (torch's `dw_builder`)."""
        work, self._waiting = self._waiting, []
        return lambda: _run(work)

    def deliver(self, parameter: Parameter, gradient: Tensor) -> None:
        """Add to a parameter's gradient as autograd would."""
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient
        if self.on_gradient is not None:
            self.on_gradient(parameter)


def _run(work: list[Callable[[], None]]) -> None:
    """Run and forget one by one, so that each frees what it holds."""
    with torch.no_grad():
        while work:
            work.pop(0)()
