"""What a layer keeps for backward: outputs that can be made again are not kept, and what is kept may go to the host.

One pair of hooks for autograd's saved tensors does both, since only the innermost pair is asked.
Selective recomputation is that of Korthikanti et al. 2022 (arXiv:2205.05198, section 5), for what is left when
attention is fused: outputs of norms and of the MLP's activation.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from .offload import HostStore


class _Again:
    """A saved tensor that is made again when it is asked for."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make


class Saving:
    """The policy of one layer; entered around its forward.

    Args:
        selective: outputs that were named by `remake` are not kept.
        host: where kept tensors go; None to stay on the device.
    """

    def __init__(self, *, selective: bool = False, host: HostStore | None = None) -> None:
        self.selective = selective
        self._host = host
        self._makers: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    def around(self) -> AbstractContextManager[Any]:
        """The hooks, if there is anything to do."""
        if not self.selective and self._host is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def remake(self, output: Tensor, again: Callable[[Tensor], Callable[[], Tensor]]) -> Tensor:
        """Let every later reader of `output` in this layer make it again instead of keeping it."""
        if self.selective and output.grad_fn is not None:
            # The tensor is held until the layer ends, so that its storage's address stays its own.
            self._makers[_storage(output)] = (output, again(output))
        return output

    def close(self) -> None:
        """The layer's forward has ended."""
        self._makers.clear()

    def _pack(self, x: Tensor) -> object:
        known = self._makers.get(_storage(x))
        if known is not None and x.shape == known[0].shape:
            return _Again(known[1])
        return x if self._host is None else self._host.put(x)

    def _unpack(self, kept: object) -> Tensor:
        if isinstance(kept, _Again):
            return kept.make()
        if isinstance(kept, torch.Tensor):
            return kept
        assert self._host is not None  # noqa: S101 - only a host store packs to something else
        return self._host.get(kept)


def _storage(x: Tensor) -> int:
    """Identity of the memory behind a tensor; works for fake tensors too."""
    return x.untyped_storage()._cdata
