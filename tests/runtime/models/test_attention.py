"""Attention of one rank and of context-parallel ranks equals torch's, with masks, windows, ALiBi and shared heads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from runtime.models.attention import AttentionShape, attend
from runtime.models.attention_kernels import CpuKernel
from runtime.parallel.context import ContextParallel

if TYPE_CHECKING:
    from tests.ranks import RankPool

LENGTH, BATCH, WIDTH = 16, 2, 8
Results = list[torch.Tensor]


def inputs(heads: int, kv_heads: int) -> tuple[Results, torch.Tensor]:
    """q, k, v of whole sequences, (sequence, batch, heads, width), and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(LENGTH, BATCH, n, WIDTH, generator=generator) for n in (heads, kv_heads, kv_heads, heads)]
    return made[:3], made[3]


def slopes_of(heads: int, alibi: bool) -> torch.Tensor | None:
    return 2.0 ** -torch.arange(1, heads + 1) if alibi else None


def whole(heads: int, kv_heads: int, window: int, alibi: bool) -> Results:
    """Output and gradients by torch's attention with a mask that is written out."""
    qkv, g = inputs(heads, kv_heads)
    back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]
    slopes = slopes_of(heads, alibi)
    mask = torch.zeros(1, LENGTH, LENGTH) if slopes is None else -slopes[:, None, None] * back
    mask = mask.masked_fill((back < 0) | (back >= (window or LENGTH)), -math.inf)
    q, k, v = (x.permute(1, 2, 0, 3).requires_grad_() for x in qkv)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None], enable_gqa=True)
    gradients = torch.autograd.grad(out, (q, k, v), g.permute(1, 2, 0, 3))
    return [x.detach().permute(2, 0, 1, 3) for x in (out, *gradients)]


def parted(kind: str, heads: int, kv_heads: int, window: int, alibi: bool) -> Results:
    """Output and gradients of this rank's tokens."""
    n = dist.get_world_size() if kind != "none" else 1
    rank = dist.get_rank() if kind != "none" else 0
    cp = ContextParallel(kind, dist.group.WORLD if n > 1 else None, rank, n)
    slopes = slopes_of(heads, alibi)
    if slopes is not None and kind == "ulysses":
        slopes = slopes.chunk(n)[rank]
    qkv, g = inputs(heads, kv_heads)
    own = cp.positions(LENGTH)
    q, k, v = (x[own].requires_grad_() for x in qkv)
    out = attend(q, k, v, AttentionShape(CpuKernel(), cp, window, slopes))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), g[own])]


SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "alibi"),
    [(4, 4, 0, False), (4, 2, 0, False), (4, 1, 0, False), (4, 2, 5, False), (4, 4, 0, True), (4, 4, 3, True)],
)


@SHAPES
def test_one_rank_attends_as_torch(heads: int, kv_heads: int, window: int, alibi: bool) -> None:
    for ours, right in zip(
        parted("none", heads, kv_heads, window, alibi), whole(heads, kv_heads, window, alibi), strict=True
    ):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


@SHAPES
@pytest.mark.parametrize("kind", ["ulysses", "allgather", "ring"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_a_sequence_attend_as_one(
    ranks: RankPool, world: int, kind: str, heads: int, kv_heads: int, window: int, alibi: bool
) -> None:
    right = whole(heads, kv_heads, window, alibi)
    for rank, found in enumerate(ranks.run(world, parted, kind, heads, kv_heads, window, alibi)):
        own = ContextParallel(kind, None, rank, world).positions(LENGTH)
        for ours, all_tokens in zip(found, right, strict=True):
            torch.testing.assert_close(ours, all_tokens[own], rtol=1e-4, atol=1e-5)
