"""Context parallelism: how attention sees the other parts of the sequence. One interface, three kinds.

`ulysses` (DeepSpeed Ulysses, arXiv:2309.14509) exchanges sequence for heads. `allgather` (Llama 3, arXiv:2407.21783,
section 3.3.2) gathers keys and values, again in backward. `ring` (Liu et al. 2023, arXiv:2310.01889) passes them on.
Under the last two a rank holds an early and a late chunk, so that the causal mask leaves each rank the same work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from runtime.autograd import apply_talking

from .collectives import exchange, gather_rows, scatter_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ContextParallel:
    """What attention needs to know of its cp group.

    Attributes:
        kind: `none`, `ulysses`, `allgather` or `ring`.
        group: None for cp 1.
    """

    kind: str = "none"
    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks of the sequence that this rank holds, of `n_chunks`, in its own order."""
        if self.kind in {"allgather", "ring"}:
            return (self.rank, 2 * self.size - 1 - self.rank)
        return (self.rank,)

    @property
    def n_chunks(self) -> int:
        """Chunks that a sequence is cut into."""
        return self.size * (2 if self.kind in {"allgather", "ring"} else 1)

    def positions(self, seq_len: int) -> Tensor:
        """Positions of a sequence that this rank holds, in its order, (seq_len / cp,)."""
        length = seq_len // self.n_chunks
        return torch.cat([torch.arange(c * length, (c + 1) * length) for c in self.chunks])


def to_heads(x: Tensor, cp: ContextParallel) -> Tensor:
    """Ulysses: own tokens of all heads to all tokens of own heads.

    Args:
        x: (sequence / cp, batch, heads, width).

    Returns:
        (sequence, batch, heads / cp, width).
    """
    out: Tensor = apply_talking(_ToHeads, x, cp)
    return out


def to_tokens(x: Tensor, cp: ContextParallel) -> Tensor:
    """Ulysses: the way back, (sequence, batch, heads / cp, width) to (sequence / cp, batch, heads, width)."""
    out: Tensor = apply_talking(_ToTokens, x, cp)
    return out


def gather_natural(x: Tensor, cp: ContextParallel) -> Tensor:
    """All ranks' tokens in the order of the sequence, (sequence, ...)."""
    assert cp.group is not None  # noqa: S101 - cp 1 has nothing to gather
    pieces = gather_rows(x, cp.group).unflatten(0, (cp.size, 2, -1))
    early, late = pieces[:, 0], pieces[:, 1].flip(0)
    return torch.cat((early, late)).flatten(0, 1)


def scatter_natural(x: Tensor, cp: ContextParallel) -> Tensor:
    """This rank's tokens of the sum over ranks; the way back of `gather_natural`."""
    assert cp.group is not None  # noqa: S101 - cp 1 has nothing to scatter
    chunks = x.unflatten(0, (2 * cp.size, -1))
    pairs = torch.stack((chunks[: cp.size], chunks[cp.size :].flip(0)), 1)
    return scatter_sum(pairs.flatten(0, 2), cp.group)


def pass_on_later(x: Tensor, cp: ContextParallel) -> Callable[[], Tensor]:
    """Start to send to the next rank of the ring; calling the result waits for what the previous one sends here."""
    assert cp.group is not None  # noqa: S101 - cp 1 has no ring
    out = torch.empty_like(x)
    ranks = dist.get_process_group_ranks(cp.group)
    onward, back = ranks[(cp.rank + 1) % cp.size], ranks[(cp.rank - 1) % cp.size]
    sent = x.contiguous()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, onward, cp.group), dist.P2POp(dist.irecv, out, back, cp.group)]
    )

    def arrived() -> Tensor:
        for work in works:
            work.wait()
        return out

    return arrived


def _heads_out(x: Tensor, cp: ContextParallel) -> Tensor:
    assert cp.group is not None  # noqa: S101 - cp 1 exchanges nothing
    tokens, batch, heads, width = x.shape
    parts = x.reshape(tokens, batch, cp.size, heads // cp.size, width).permute(2, 0, 1, 3, 4)
    return exchange(parts.contiguous(), cp.group).reshape(cp.size * tokens, batch, heads // cp.size, width)


def _heads_back(x: Tensor, cp: ContextParallel) -> Tensor:
    assert cp.group is not None  # noqa: S101 - cp 1 exchanges nothing
    sequence, batch, heads, width = x.shape
    parts = exchange(x.reshape(cp.size, sequence // cp.size, batch, heads, width), cp.group)
    return parts.permute(1, 2, 0, 3, 4).reshape(sequence // cp.size, batch, cp.size * heads, width)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextParallel) -> Tensor:  # noqa: ANN401
        ctx.cp = cp
        return _heads_out(x, cp)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _heads_back(g, ctx.cp), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextParallel) -> Tensor:  # noqa: ANN401
        ctx.cp = cp
        return _heads_back(x, cp)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _heads_out(g, ctx.cp), None
