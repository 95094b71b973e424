"""A tied embedding on a pipeline: first and last stage hold a copy each, whose gradients are summed.

Both copies start alike and see the same summed gradient, so the same update keeps them alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.parallel.trainable import Trainable

_TABLE, _COPY = "embedding.weight", "head.weight"


class TiedEmbedding:
    """What this rank holds of a tied embedding.

    Args:
        group: first and last pipeline rank; None where one rank holds both (zb-v), or neither.
    """

    def __init__(self, trainables: tuple[Trainable, ...], group: dist.ProcessGroup | None) -> None:
        self._held = [t for t in trainables if t.name in {_TABLE, _COPY}]
        self._group = group

    def sum_gradients(self) -> None:
        """Both copies get the sum of both gradients."""
        gradients: list[Tensor] = [g for t in self._held if (g := t.gradient()) is not None]
        if len(gradients) == 2:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        elif gradients and self._group is not None:
            dist.all_reduce(gradients[0], group=self._group)


def marked_copies(trainables: tuple[Trainable, ...]) -> tuple[Trainable, ...]:
    """The head of a tied model counts once, as the embedding that it is a copy of."""
    return tuple(replace(t, borrowed=True) if t.name == _COPY else t for t in trainables)
