"""Operators of our own with their own backward: torch's `Function.apply`, which torch leaves untyped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.autograd import Function


def apply(function: type[Function], *arguments: Any) -> Any:  # noqa: ANN401 - what the function takes and gives
    """Run an operator's forward and note its backward."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]
