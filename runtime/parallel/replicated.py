"""ZeRO-0: every data-parallel rank holds all weights; gradients are summed in buckets while backward goes on.

Gradients live in flat full-precision buckets, one message each, filled from the last parameter to the first (Li et al.
2020, arXiv:2006.15704, section 3.2.3). In low precision the model computes with a copy of its full-precision weights.
In full precision without another rank they stay where autograd puts them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from .trainable import Swapping, Trainable, Whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from runtime.models.roles import Role

    from .weight_gradients import WeightGradients

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""DistributedDataParallel's defaults: the first bucket is small, so that its message starts early in backward."""
_FEWEST_MESSAGES = 4
"""A small model's gradients fit one bucket, whose message would start when backward is over."""


@dataclass(slots=True, eq=False)
class _Bucket:
    group: dist.ProcessGroup | None
    parameters: list[nn.Parameter] = field(default_factory=list)
    flat: Tensor | None = None
    missing: set[int] = field(default_factory=set)
    work: dist.Work | None = None
    started: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copies:
    """Who holds copies of a parameter: the mesh (replicate, shard, tp or ep) and the group that sums gradients."""

    whole: Callable[[nn.Parameter, Role], Whole]
    group: Callable[[Role], dist.ProcessGroup | None]
    count: Callable[[Role], int]


class Replicated:
    """One model chunk under ZeRO-0. See `runtime.parallel.data.DataParallel` for the protocol."""

    def __init__(
        self,
        module: nn.Module,
        roles: dict[str, Role],
        copies: Copies,
        *,
        dtype: torch.dtype,
        gradients: WeightGradients,
        bucket_bytes: int = BUCKET_BYTES,
        asynchronous: bool = True,
        swap: Swapping | None = None,
    ) -> None:
        self._asynchronous = asynchronous
        self._last = False
        gradients.on_gradient = self._arrived
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._low = dtype != torch.float32
        main: dict[str, Tensor] = {}
        for name, parameter in named:
            main[name] = parameter.detach()
            if self._low:
                main[name] = parameter.detach() if swap is None else swap(parameter.detach())
                parameter.data = parameter.data.to(dtype)
        self._views: dict[int, Tensor] = {}
        self._bucket_of: dict[int, _Bucket] = {}
        self._parameters = [parameter for _, parameter in named]
        filled = [(p, roles[n]) for n, p in reversed(named) if self._low or copies.group(roles[n]) is not None]
        self._buckets = self._fill(filled, copies, bucket_bytes)
        # Parameters whose bucket still holds the last step's gradient: the first one of this step takes its place.
        self._stale: set[int] = set()
        for parameter, _ in filled:
            parameter.register_post_accumulate_grad_hook(self._arrived)
        self.trainables = tuple(
            Trainable(
                name=n,
                role=roles[n],
                weight=main[n],
                gradient=lambda p=p: self._views.get(id(p), p.grad),  # type: ignore[misc]
                copies=copies.count(roles[n]),
                whole=copies.whole(p, roles[n]),
                low=p.detach() if self._low else None,
            )
            for n, p in named
        )

    def _fill(
        self, parameters: Iterable[tuple[nn.Parameter, Role]], copies: Copies, bucket_bytes: int
    ) -> list[_Bucket]:
        """Parameters of one group share buckets of about `bucket_bytes`, or less where that would make too few."""
        parameters = list(parameters)
        total = sum(parameter.numel() * 4 for parameter, _ in parameters)
        bucket_bytes = min(bucket_bytes, max(total // _FEWEST_MESSAGES, FIRST_BUCKET_BYTES))
        open_: dict[bool, _Bucket] = {}
        buckets: list[_Bucket] = []
        sizes: dict[int, int] = {}
        for parameter, role in parameters:
            bucket = open_.get(role.expert)
            first = bucket is None or bucket is next(b for b in buckets if b.group is bucket.group)
            limit = min(FIRST_BUCKET_BYTES, bucket_bytes) if first else bucket_bytes
            if bucket is None or sizes[id(bucket)] >= limit:
                bucket = open_[role.expert] = _Bucket(copies.group(role))
                buckets.append(bucket)
                sizes[id(bucket)] = 0
            bucket.parameters.append(parameter)
            sizes[id(bucket)] += parameter.numel() * 4
        for bucket in buckets:
            bucket.flat = torch.zeros(sizes[id(bucket)] // 4, device=bucket.parameters[0].device)
            at = 0
            for parameter in bucket.parameters:
                self._views[id(parameter)] = bucket.flat[at : at + parameter.numel()].view(parameter.shape)
                self._bucket_of[id(parameter)] = bucket
                at += parameter.numel()
        return buckets

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self._stale = set(self._views)
        for parameter in self._parameters:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.started, bucket.work = False, None

    def before_backward(self, *, last: bool, split: bool = False) -> None:
        """A micro batch's backward begins; with `split` weight gradients come later."""
        self._last = last and self._asynchronous and not split
        if self._last:
            for bucket in self._buckets:
                bucket.missing = {id(p) for p in bucket.parameters}

    def after_weights(self, *, last: bool) -> None:
        """A micro batch's deferred weight gradients are there; nothing to do before `finish`."""

    def _arrived(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None:
            return
        if parameter.grad is not None:
            self._take(parameter, parameter.grad)
            parameter.grad = None
        bucket.missing.discard(id(parameter))
        if self._last and not bucket.missing:
            self._start(bucket)

    def _take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        view = self._views[id(parameter)]
        if id(parameter) in self._stale:
            self._stale.discard(id(parameter))
            view.copy_(gradient)
        else:
            view += gradient

    def _start(self, bucket: _Bucket) -> None:
        if bucket.started:
            return
        bucket.started = True
        if bucket.group is not None and bucket.flat is not None:
            bucket.work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)

    def finish(self) -> None:
        """All gradients of the step are reduced when this returns."""
        for unused in self._stale:
            self._views[unused].zero_()
        self._stale = set()
        for bucket in self._buckets:
            self._start(bucket)
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        self._last = False


def replicated_whole(parameter: nn.Parameter, role: Role, size: int, mesh: object) -> Whole:
    """The whole of a parameter that is cut over the last axis of a (replicate, shard, tp or ep) mesh alone."""
    shape = list(parameter.shape)
    placement = Replicate() if role.cut is None else Shard(role.cut)
    if role.cut is not None:
        shape[role.cut] *= size
    return Whole(shape=tuple(shape), mesh=mesh, placements=(Replicate(), Replicate(), placement))  # type: ignore[arg-type]
