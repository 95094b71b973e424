"""The dispatch mode of a dry run: it sees every operator and tells memory, FLOPs and messages of it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .torch_fake import backward_node, is_message, message_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch.distributed as dist

    from runtime.parallel.weight_gradients import WeightGradients

    from .ledger import Ledger

_aten = torch.ops.aten
_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
}


class Watch(TorchDispatchMode):
    """Sees every operator.

    Attributes:
        flops: of products, by whether backward ran them.
        messages: kind, group and bytes of each message, in order.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger
        self._deferred = False
        self.flops = {False: 0.0, True: 0.0}
        self.messages: list[tuple[str, dist.ProcessGroup, int]] = []

    def begin_step(self) -> None:
        """Count from zero."""
        self.flops = {False: 0.0, True: 0.0}
        self.messages = []

    def add_flops(self, flops: float) -> None:
        """Count what an operator computes that is not a plain product."""
        self.flops[self._deferred or bool(backward_node())] += flops

    def follow(self, stores: Iterable[WeightGradients | None]) -> None:
        """Count what these stores compute later as part of backward, outside of which it then runs."""
        for store in stores:
            if store is not None:
                _around(store, self)

    @contextmanager
    def later(self) -> Iterator[None]:
        """Deferred weight gradients run."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run an operator and note it."""
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        product = _PRODUCTS.get(packet)
        if product is not None and backward_node() not in _SUMS:
            self.add_flops(_product_flops(args[product], args[product + 1]))
        elif is_message(func):
            group, n_bytes = message_of(func, args)
            name = packet.__name__
            self.messages.append((_KINDS.get(name, name), group, n_bytes))
        self._ledger.see(tree_leaves(result), packet.__name__)
        return result


_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.addmm_: 1, _aten.baddbmm: 1}
"""Operators and the place of their first factor."""


_SUMS = {"_RmsNormBackward"}
"""Nodes of backward whose products with a vector are sums over rows and columns: the work of a vector operator."""


def _around(store: WeightGradients, watch: Watch) -> None:
    inner = store.defer

    def defer(work: Callable[[], None]) -> None:
        def run() -> None:
            with watch.later():
                work()

        inner(run)

    store.defer = defer  # type: ignore[method-assign]


def _product_flops(a: torch.Tensor, b: torch.Tensor) -> float:
    """Two for each of the m x k x n multiplications, times the batch."""
    return 2.0 * a.numel() * b.shape[-1]
