"""What a dry run finds out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

CATEGORIES = (
    "weights",
    "gradients",
    "main_weights",
    "optimizer",
    "activations",
    "gathered",
    "pipeline_buffers",
    "buffers",
    "temporaries",
)
"""Each live byte is in exactly one, by the memory that it lies in.

weights: what the model computes with for the whole step. gathered: weights that ZeRO-3 gathers for a layer.
gradients: accumulated over micro batches, or reduced. activations: made in one pass over a micro batch and needed in
a later one. pipeline_buffers: on their way between stages. buffers: position tables and the batch itself.
temporaries: made and dropped within one pass.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """One tensor that is alive at the peak.

    Attributes:
        made_by: operator; in backward with the autograd node that ran it.
        module: whose forward or backward made it, or the parameter that it belongs to.
        moment: the pass that made it.
    """

    n_bytes: int
    category: str
    shape: tuple[int, ...]
    dtype: str
    made_by: str
    module: str
    moment: str


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Message:
    """All messages of one kind in one group during a step.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `send` or `recv`.
        group: dimension, such as `tp` or `dp_shard`.
        ranks: of the group.
        n_bytes: of all of them. All-gather: output, reduce-scatter: input, otherwise the tensor.
    """

    group: str
    kind: str
    count: int
    n_bytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Live bytes of the device at one point of the step.

    Attributes:
        at: operators since the step began.
    """

    at: int
    n_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """One step of one rank.

    Attributes:
        memory_bytes: live bytes at the peak by category.
        moment: when the peak was.
        forward_flops, backward_flops: of products and attention; recomputation is in the second.
        host_bytes: swapped and offloaded.
        highs: for each pass and module that made something, live bytes at its fullest point by category.
    """

    rank: int
    peak_bytes: int
    memory_bytes: Mapping[str, int]
    moment: str
    largest: tuple[LiveTensor, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_bytes: int
    forward_flops: float
    backward_flops: float
    messages: tuple[Message, ...]
    timeline: tuple[Moment, ...] = field(repr=False)
    highs: Mapping[tuple[str, str], Mapping[str, int]] = field(repr=False, default_factory=dict)
    seconds: float

    @property
    def flops(self) -> float:
        """Of the step."""
        return self.forward_flops + self.backward_flops
