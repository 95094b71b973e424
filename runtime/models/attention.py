"""Causal attention over what context parallelism leaves on a rank: keeps q, k, v as they are, output and statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from runtime.autograd import apply, apply_talking
from runtime.parallel.context import (
    ContextParallel,
    gather_natural,
    pass_on_later,
    scatter_natural,
    to_heads,
    to_tokens,
)

from .attention_kernels import Kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from .attention_kernels import AttentionKernel


@dataclass(frozen=True, slots=True, eq=False)
class AttentionShape:
    """What attention needs besides its inputs.

    Attributes:
        window: tokens that attention looks back; 0 for all.
        slopes: ALiBi's slope of each head on this rank, (heads,); None without.
    """

    kernel: AttentionKernel
    cp: ContextParallel
    window: int = 0
    slopes: Tensor | None = None

    @property
    def biased(self) -> bool:
        """Whether scores need more than the causal mask."""
        return bool(self.window) or self.slopes is not None


def attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
    """Attention of this rank's tokens.

    Args:
        q, k, v: (own tokens of a sequence, batch, heads, width); key/value heads may be fewer.

    Returns:
        (own tokens of a sequence, batch, heads, width of v).
    """
    cp = shape.cp
    if cp.kind != "ulysses":
        return _attended(q, k, v, shape)
    # Fewer key/value heads than ranks: each rank needs one, so heads are repeated before they are dealt out.
    repeat = max(cp.size // k.shape[2], 1)
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    out = _attended(to_heads(q, cp), to_heads(k, cp), to_heads(v, cp), shape)
    return to_tokens(out, cp)


def _attended(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
    out: Tensor = (apply if shape.cp.group is None else apply_talking)(_Attention, q, k, v, shape)
    return out


@dataclass(frozen=True, slots=True)
class _Part:
    """One call of the kernel: own queries [q0, q1) against keys [k0, k1) of what is gathered."""

    queries: slice
    keys: slice
    causal: bool


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:  # noqa: ANN401
        ctx.shape = shape
        parts = _Merged()
        for part, keys, values in _rounds(k, v, shape):
            query, key, value = _heads_first(q[part.queries]), _heads_first(keys), _heads_first(values)
            bias = _bias(part, shape, q)
            parts.add(part, *shape.kernel.forward(query, key, value, causal=part.causal, bias=bias))
        out, statistics = parts.result()
        ctx.save_for_backward(q, k, v, out, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # noqa: ANN401
        # What the parts are computed with is gone before the sums travel.
        return (*_summed(ctx, g).result(), None)


def _summed(ctx: Any, g: Tensor) -> _GradientSums:  # noqa: ANN401 - of torch's function
    q, k, v, out, statistics = ctx.saved_tensors
    shape: AttentionShape = ctx.shape
    sums = _GradientSums(q, k, v, shape)
    for part, keys, values in _rounds(k, v, shape):
        rows = part.queries
        q_rows, k_seen, v_seen, out_rows = (_heads_first(x) for x in (q[rows], keys, values, out[rows]))
        kept = Kept(q_rows, k_seen, v_seen, out_rows, statistics[:, :, rows])
        bias = _bias(part, shape, q)
        found = shape.kernel.backward(_heads_first(g[rows]), kept, causal=part.causal, bias=bias)
        sums.add(part, *(_sequence_first(x) for x in found))
    return sums


def _rounds(k: Tensor, v: Tensor, shape: AttentionShape) -> Iterator[tuple[_Part, Tensor, Tensor]]:
    """Calls of the kernel with the keys and values of each."""
    if shape.cp.kind not in {"allgather", "ring"}:
        yield _Part(slice(0, k.shape[0]), slice(0, k.shape[0]), not shape.biased), k, v
        return
    # A window can hide a whole passed chunk from a query, whose softmax would then be empty.
    ring = shape.cp.kind == "ring" and not shape.window
    yield from (_passed if ring else _gathered)(k, v, shape)


def _gathered(k: Tensor, v: Tensor, shape: AttentionShape) -> Iterator[tuple[_Part, Tensor, Tensor]]:
    """All keys are here: each own chunk attends to all chunks before it, and to itself under the causal mask."""
    keys, values = gather_natural(k, shape.cp), gather_natural(v, shape.cp)
    length = k.shape[0] // 2
    for place, chunk in enumerate(shape.cp.chunks):
        queries = slice(place * length, (place + 1) * length)
        own = slice(chunk * length, (chunk + 1) * length)
        if shape.biased:
            seen = slice(0, own.stop)
            yield _Part(queries, seen, causal=False), keys[seen], values[seen]
            continue
        if chunk:
            before = slice(0, own.start)
            yield _Part(queries, before, causal=False), keys[before], values[before]
        yield _Part(queries, own, causal=True), keys[own], values[own]


def _passed(k: Tensor, v: Tensor, shape: AttentionShape) -> Iterator[tuple[_Part, Tensor, Tensor]]:
    """Pairs of chunks come by one rank after another."""
    cp, length = shape.cp, k.shape[0] // 2
    keys, values = k, v
    for round_ in range(cp.size):
        # The next pair travels while this one is computed with.
        coming = [pass_on_later(x, cp) for x in (keys, values)] if round_ + 1 < cp.size else []
        source = (cp.rank - round_) % cp.size
        for place, chunk in enumerate(cp.chunks):
            for held, other in enumerate((source, 2 * cp.size - 1 - source)):
                if other > chunk:
                    continue
                rows = slice(held * length, (held + 1) * length)
                queries = slice(place * length, (place + 1) * length)
                seen = slice(other * length, (other + 1) * length)
                yield _Part(queries, seen, causal=other == chunk and not shape.biased), keys[rows], values[rows]
        if coming:
            keys, values = (arrived() for arrived in coming)


class _Merged:
    """Parts of one softmax over different keys, brought together by their statistics (FlashAttention's rescaling)."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[slice, Tensor, Tensor]] = {}

    def add(self, part: _Part, out: Tensor, statistics: Tensor) -> None:
        """One part's output and statistics."""
        known = self._rows.get(part.queries.start)
        if known is not None:
            out, statistics = _together(known[1], known[2], out, statistics)
        self._rows[part.queries.start] = (part.queries, out, statistics)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output, sequence first, and statistics."""
        rows = [self._rows[start] for start in sorted(self._rows)]
        if len(rows) == 1:
            return _sequence_first(rows[0][1]), rows[0][2]
        return torch.cat([_sequence_first(out) for _, out, _ in rows]), torch.cat([s for *_, s in rows], 2)


def _together(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs weighted by their share of the joint denominator."""
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = (lse_a - lse).exp_()[..., None], (lse_b - lse).exp_()[..., None]
    return (out_a.float() * share_a).addcmul_(out_b.float(), share_b).to(out_a.dtype), lse


class _GradientSums:
    """Gradients of q, k and v over all parts."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> None:
        self._shape = shape
        self._whole = shape.cp.kind in {"allgather", "ring"}
        self._q, self._k, self._v = q, k, v
        self._sums: list[Tensor] = []

    def add(self, part: _Part, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Gradients of one part."""
        if not self._whole:
            self._sums = [dq, dk, dv]
            return
        if not self._sums:
            n = self._shape.cp.size
            self._sums = [torch.zeros_like(self._q)]
            self._sums += [x.new_zeros((x.shape[0] * n, *x.shape[1:])) for x in (self._k, self._v)]
        self._sums[0][part.queries] += dq
        self._sums[1][part.keys] += dk
        self._sums[2][part.keys] += dv

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of what this rank holds."""
        dq, dk, dv = self._sums
        if self._whole:
            dk, dv = scatter_natural(dk, self._shape.cp), scatter_natural(dv, self._shape.cp)
        return dq, dk, dv


def _bias(part: _Part, shape: AttentionShape, q: Tensor) -> Tensor | None:
    """Causal mask, window and ALiBi of one part as values to add, (1 or heads, queries, keys)."""
    if not shape.biased:
        return None
    if shape.cp.kind in {"allgather", "ring"}:
        length = q.shape[0] // 2
        chunk = shape.cp.chunks[part.queries.start // length]
        first = chunk * length
    else:
        first = 0
    rows = torch.arange(first, first + part.queries.stop - part.queries.start, device=q.device)[:, None]
    columns = torch.arange(part.keys.start, part.keys.stop, device=q.device)[None]
    back = rows - columns
    hidden = back < 0
    if shape.window:
        hidden = hidden | (back >= shape.window)
    bias = torch.zeros(back.shape, device=q.device, dtype=torch.float32)[None]
    if shape.slopes is not None:
        bias = -shape.slopes.float()[:, None, None] * back.clamp_min(0)[None]
    return bias.masked_fill(hidden[None], float("-inf"))


def _heads_first(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)


def _sequence_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3)
