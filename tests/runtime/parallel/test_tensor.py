"""Linear layers and embeddings cut over tp equal the whole ones, forward and backward, with tokens whole or sharded."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.nn import Parameter

from runtime.models.loss import LossShape, token_loss
from runtime.parallel.tensor import (
    TensorParallel,
    column_linear,
    copy_to_region,
    reduce_from_region,
    row_linear,
    vocabulary_embedding,
)
from runtime.parallel.weight_gradients import WeightGradients

if TYPE_CHECKING:
    from tests.ranks import RankPool

TOKENS, HIDDEN, WIDE, VOCABULARY = 8, 6, 12, 10
Results = list[torch.Tensor]


def drawn(*shapes: tuple[int, ...]) -> Results:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def place(sequence: bool, *, later: WeightGradients | None = None) -> TensorParallel:
    """The tp group of all ranks, or of this process alone."""
    if not dist.is_initialized():
        return TensorParallel(gradients=later)
    return TensorParallel(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), sequence, later)


def own(x: torch.Tensor, tp: TensorParallel, axis: int = 0) -> torch.Tensor:
    return x.chunk(tp.size, axis)[tp.rank].clone()


def tokens_of(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    return own(x, tp) if tp.sequence else x.clone()


def block(sequence: bool, later: bool) -> Results:
    """Two column-parallel layers, their product, a row-parallel one: output and all gradients of this rank."""
    x, up, gate, down, up_bias, down_bias, g = drawn(
        (TOKENS, HIDDEN), (WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE), (WIDE,), (HIDDEN,), (TOKENS, HIDDEN)
    )
    store = WeightGradients()
    tp = place(sequence, later=store)
    x = tokens_of(x, tp).requires_grad_()
    columns = [Parameter(own(w, tp)) for w in (up, gate, up_bias)]
    row, bias = Parameter(own(down, tp, 1)), Parameter(down_bias)
    store.deferring = later
    a, b = column_linear(x, columns[:2], (columns[2], None), tp)
    out = row_linear(a * b, row, bias, tp)
    out.backward(tokens_of(g, tp))
    waiting = store.take()
    assert (columns[0].grad is None) == later
    waiting()
    if sequence:  # each rank has a part of the bias's gradient, which the trainer sums before the update
        dist.all_reduce(bias.grad)
    return [out.detach(), *(p.grad for p in (x, *columns, row, bias))]


def whole_block() -> Results:
    x, up, gate, down, up_bias, down_bias, g = (
        t.requires_grad_() for t in drawn(
            (TOKENS, HIDDEN), (WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE), (WIDE,), (HIDDEN,), (TOKENS, HIDDEN)
        )
    )  # fmt: skip
    out = F.linear(F.linear(x, up, up_bias) * F.linear(x, gate), down, down_bias)
    return [out.detach(), *torch.autograd.grad(out, (x, up, gate, up_bias, down, down_bias), g)]


def parts_of(whole: Results, rank: int, size: int, sequence: bool) -> Results:
    """This rank's parts of what `block` returns."""
    tp = TensorParallel(None, rank, size, sequence)
    out, dx, up, gate, up_bias, down, bias = whole
    columns = [own(x, tp) for x in (up, gate, up_bias)]
    return [tokens_of(out, tp), tokens_of(dx, tp), *columns, own(down, tp, 1), bias]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("world", "sequence"), [(1, False), (2, False), (2, True), (4, True)])
def test_a_block_cut_over_tp_is_the_whole_block(ranks: RankPool, world: int, sequence: bool, later: bool) -> None:
    for rank, found in enumerate(ranks.run(world, block, sequence, later)):
        for ours, right in zip(found, parts_of(whole_block(), rank, world, sequence), strict=True):
            torch.testing.assert_close(ours, right)


def embedding_and_loss(sequence: bool, rows: int) -> Results:
    """Embedding, head and loss under a vocabulary that may be padded."""
    table, head = drawn((rows, HIDDEN), (rows, HIDDEN))
    tokens = torch.arange(TOKENS) * 7 % VOCABULARY
    labels = torch.arange(TOKENS) * 3 % VOCABULARY
    tp = place(sequence)
    table, head = Parameter(own(table, tp)), Parameter(own(head, tp))
    loss = token_loss(vocabulary_embedding(tokens, table, tp), head, labels, LossShape(tp, VOCABULARY, 0.1, 3))
    loss.backward()
    return [loss.detach(), table.grad, head.grad]


@pytest.mark.parametrize(("world", "sequence", "rows"), [(1, False, 10), (2, False, 10), (2, True, 10), (4, True, 12)])
def test_embedding_and_loss_cut_over_tp_are_whole(ranks: RankPool, world: int, sequence: bool, rows: int) -> None:
    table, head = (x.requires_grad_() for x in drawn((rows, HIDDEN), (rows, HIDDEN)))
    hidden = F.embedding(torch.arange(TOKENS) * 7 % VOCABULARY, table)
    logits = hidden @ head[:VOCABULARY].t()
    wanted = 0.1 * F.cross_entropy(logits, torch.arange(TOKENS) * 3 % VOCABULARY, reduction="sum")
    gradients = torch.autograd.grad(wanted, (table, head))
    for rank, (loss, *found) in enumerate(ranks.run(world, embedding_and_loss, sequence, rows)):
        torch.testing.assert_close(loss, wanted.detach())
        for ours, right in zip(found, gradients, strict=True):
            torch.testing.assert_close(ours, right.chunk(world)[rank])


def region(sequence: bool) -> Results:
    """Each rank multiplies all tokens by its number; the sum comes back to own tokens."""
    (x,) = drawn((TOKENS, HIDDEN))
    tp = place(sequence)
    x = tokens_of(x, tp).requires_grad_()
    out = reduce_from_region(copy_to_region(x, tp) * (tp.rank + 1), tp)
    out.backward(tokens_of(torch.ones(TOKENS, HIDDEN), tp))
    return [out.detach(), x.grad, torch.tensor(tp.rank)]


@pytest.mark.parametrize("sequence", [False, True])
def test_a_region_of_all_tokens_sums_what_its_ranks_make(ranks: RankPool, sequence: bool) -> None:
    (x,) = drawn((TOKENS, HIDDEN))
    for out, gradient, rank in ranks.run(2, region, sequence):
        tp = TensorParallel(None, int(rank), 2, sequence)
        torch.testing.assert_close(out, tokens_of(3 * x, tp))
        torch.testing.assert_close(gradient, tokens_of(torch.full_like(x, 3.0), tp))


@pytest.mark.parametrize("layer", ["column", "row"])
def test_a_weight_gradient_that_waits_holds_nothing_before_the_layer(layer: str) -> None:
    """A pipeline stage's input is a leaf at the bottom of its graph: it is free once the input's gradient is sent."""
    store = WeightGradients()
    tp, weight = place(False, later=store), Parameter(torch.ones(WIDE, HIDDEN))
    leaf = torch.ones(TOKENS, HIDDEN, requires_grad=True)
    store.deferring = True
    between = leaf * 2
    out = (
        column_linear(between, (weight,), (None,), tp)[0]
        if layer == "column"
        else row_linear(between, weight, None, tp)
    )
    out.sum().backward()
    waiting, there = store.take(), weakref.ref(leaf)
    del leaf, between, out
    gc.collect()
    assert there() is None
    waiting()
    torch.testing.assert_close(weight.grad, torch.full((WIDE, HIDDEN), 2.0 * TOKENS))
