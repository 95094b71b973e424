"""What a dry run puts in the place of a device, of its attention kernel and of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.device_training import CpuDevice
from runtime.models.attention_kernels import CpuKernel, Kept

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.models.attention_kernels import Gradients

    from .ledger import Ledger
    from .watch import Watch


class CountedDevice(CpuDevice):
    """A CPU whose host is somebody else: what is swapped or offloaded does not count as the device's memory."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def host_like(self, x: Tensor) -> Tensor:
        """Memory that the ledger leaves out."""
        host = super().host_like(x)
        self._ledger.to_host(host)
        return host


class DryDevice(CountedDevice):
    """One without numbers."""

    def numbers(self, x: Tensor) -> list[float]:
        """There are none; one is finite and positive."""
        return [1.0] * x.numel()


class CountingKernel(CpuKernel):
    """The CPU's attention, its FLOPs counted by the shapes that it was given, not by those it pads to.

    Forward is two products over the pairs of query and key that are not masked; backward makes the scores again and has
    four more (Dao 2023, arXiv:2307.08691, section 2.3).
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """See AttentionKernel."""
        self._watch.add_flops(2.0 * _pairs(q, k, causal=causal) * (q.shape[-1] + v.shape[-1]))
        return super().forward(q, k, v, causal=causal, bias=bias)

    def backward(self, g: Tensor, kept: Kept, *, causal: bool, bias: Tensor | None) -> Gradients:
        """See AttentionKernel."""
        pairs = _pairs(kept.q, kept.k, causal=causal)
        self._watch.add_flops(2.0 * pairs * (3 * kept.q.shape[-1] + 2 * kept.v.shape[-1]))
        return super().backward(g, kept, causal=causal, bias=bias)


def _pairs(q: Tensor, k: Tensor, *, causal: bool) -> float:
    """Pairs of query and key over batch and heads."""
    batch, heads, queries = q.shape[:3]
    seen = queries * (queries + 1) / 2 if causal else float(queries * k.shape[2])
    return batch * heads * seen
