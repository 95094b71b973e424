"""Operators of our own with their own backward: torch's `Function.apply`, which torch leaves untyped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.autograd import Function


def apply(function: type[Function], *arguments: Any) -> Any:  # noqa: ANN401 - what the function takes and gives
    """Run an operator's forward and note its backward."""
    return function.apply(*arguments)


def apply_talking(function: type[Function], *arguments: Any) -> Any:  # noqa: ANN401 - as for apply
    """The same for an operator that talks to other ranks, which torch.compile must leave alone.

    A rank that compiles longer than another would otherwise meet it in another collective.
    """
    return _uncompiled(function, *arguments)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(function: type[Function], *arguments: Any) -> Any:  # noqa: ANN401 - as for apply
    return function.apply(*arguments)
