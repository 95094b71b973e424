"""What the parts of a model are built with: groups, shapes, and the scale of this step's loss."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.parallel.context import ContextParallel
from runtime.parallel.tensor import TensorParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch.distributed as dist
    from torch import Tensor

    from runtime.memory.offload import HostStore

    from .attention_kernels import AttentionKernel
    from .rotary import RotaryTable


def counted(counts: Tensor, _balanced_total: int) -> list[int]:
    """Rows of each receiver as numbers; waits for the device."""
    return list(counts.tolist())


def balanced(counts: Tensor, balanced_total: int) -> list[int]:
    """What the counts would be if each got the same: for a run whose numbers are not there."""
    n = counts.numel()
    return [(place + 1) * balanced_total // n - place * balanced_total // n for place in range(n)]


@dataclass(slots=True, eq=False)
class StepScale:
    """Factors that change from step to step.

    Attributes:
        token: of a token's loss: loss scale / tokens of the global batch.
        balance: of a sequence's balance loss in one layer, loss scale included.
        recomputing: a forward runs for the second time, in backward.
        balance_sum: balance losses of this step so far, over layers and sequences, of this rank's tokens.
    """

    token: float = 1.0
    balance: float = 0.0
    recomputing: bool = False
    balance_sum: Tensor | None = None

    def note_balance(self, loss: Tensor) -> None:
        """Add one layer's balance loss of one micro batch; a second run of a forward adds nothing."""
        if not self.recomputing:
            self.balance_sum = loss if self.balance_sum is None else self.balance_sum + loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Build:
    """What the parts of one model chunk share.

    Attributes:
        micro_batch: sequences of a micro batch; rows of token tensors count them fastest.
        ep, ep_size: ranks that share out the experts; 1: experts are cut over tp.
        sequence: ranks that share out the tokens of a sequence; None for one rank.
        host: where activations are offloaded to; None to keep them.
        selective: outputs of norms and activations are made again in backward.
        slopes: ALiBi's slope of each head of this rank.
        row_counts: reads how many rows go to each receiver; its second argument is their sum under balanced routing.
    """

    tp: TensorParallel = field(default_factory=TensorParallel)
    cp: ContextParallel = field(default_factory=ContextParallel)
    ep: dist.ProcessGroup | None = None
    ep_size: int = 1
    sequence: dist.ProcessGroup | None = None
    micro_batch: int = 1
    kernel: AttentionKernel | None = None
    scale: StepScale = field(default_factory=StepScale)
    host: HostStore | None = None
    selective: bool = False
    rotary: RotaryTable | None = None
    positions: Tensor | None = None
    slopes: Tensor | None = None
    row_counts: Callable[[Tensor, int], list[int]] = counted

    @property
    def alone(self) -> TensorParallel:
        """For a layer whose weight is whole on each rank and that reads own tokens."""
        return TensorParallel(gradients=self.tp.gradients)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Around a forward that runs for the second time."""
        self.scale.recomputing = True
        try:
            yield
        finally:
            self.scale.recomputing = False
