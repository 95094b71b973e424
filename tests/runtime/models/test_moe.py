"""Routing, experts and the balance loss equal sums over all experts that are written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from cost_models.model import MoeSpec
from runtime.memory.saving import Saving
from runtime.models.building import Build, StepScale
from runtime.models.moe import Router, SparseMlp, _by_expert, grouped_linear
from runtime.parallel.weight_gradients import WeightGradients
from tests.runtime.parity.models import MODELS
from tests.runtime.parity.training import config_of

TOKENS, BATCH = 12, 2


def block(name: str, balance: float = 0.0) -> tuple[SparseMlp, torch.Tensor]:
    """A sparse block with random weights, and tokens for it, sequence first."""
    model = config_of(MODELS[name], {}).model
    made = SparseMlp(model, Build(micro_batch=BATCH, scale=StepScale(balance=balance)))
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2, generator=generator)
    return made, torch.randn(TOKENS, model.hidden_dim, generator=generator).requires_grad_()


def written_out(made: SparseMlp, x: torch.Tensor, top_k: int) -> torch.Tensor:
    """Every expert on every token, times its weight: 0 for those that were not chosen."""
    logits = F.linear(x, made.router.weight)
    if made.router.bias is None:
        scores = choice = logits.softmax(-1)
    else:
        scores = logits.sigmoid()
        choice = scores + made.router.bias
    kept = scores * torch.zeros_like(scores).scatter(1, choice.topk(top_k).indices, 1.0)
    kept = kept / kept.sum(1, keepdim=True)
    up = torch.einsum("th,efh->tef", x, made.experts.up)
    gate = made.experts.gate
    hidden = F.gelu(up, approximate="tanh") if gate is None else F.silu(torch.einsum("th,efh->tef", x, gate)) * up
    out = torch.einsum("tef,ehf,te->th", hidden, made.experts.down, kept)
    if made.shared is None:
        return out
    s = made.shared
    shared = F.linear(F.silu(F.linear(x, s.gate.weight)) * F.linear(x, s.up.weight), s.down.weight)
    return out + (shared if made.shared_gate is None else shared * F.linear(x, made.shared_gate).sigmoid())


@pytest.mark.parametrize("name", ["tiny-moe", "moe-shared", "moe-gate", "moe-bias", "moe-plain"])
def test_a_sparse_block_is_the_sum_over_its_chosen_experts(name: str) -> None:
    made, x = block(name)
    if made.router.bias is not None:
        made.router.bias += torch.tensor([0.3, -0.2, 0.0, 0.1])
    inputs = (x, *made.parameters())
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    found, wanted = made(x, Saving()), written_out(made, x, 2)
    assert_close_to_rounding(found, wanted)
    for ours, right in zip(torch.autograd.grad(found, inputs, g), torch.autograd.grad(wanted, inputs, g), strict=True):
        assert_close_to_rounding(ours, right)


def assert_close_to_rounding(ours: torch.Tensor, right: torch.Tensor) -> None:
    """Sums in another order differ by the rounding of their largest terms, however small the sum comes out."""
    torch.testing.assert_close(ours, right, rtol=0, atol=1e-5 * float(right.detach().abs().max()))


def test_the_balance_loss_is_added_to_the_gradient_alone() -> None:
    """Sum over sequences of experts x (share of choices) x (mean share of score); choices take no gradient."""
    made, x = block("tiny-moe", balance=0.5)
    plain, _ = block("tiny-moe")
    torch.testing.assert_close(made(x, Saving()), plain(x, Saving()), rtol=0, atol=0)
    shares = F.linear(x, made.router.weight).softmax(-1).unflatten(0, (-1, BATCH))
    chosen = torch.zeros_like(shares).scatter(-1, shares.topk(2).indices, 1.0)
    loss = (4 * (chosen.mean(0) / 2) * shares.mean(0)).sum()
    inputs, g = (x, made.router.weight), torch.ones_like(x)
    with_balance = torch.autograd.grad(made(x, Saving()), inputs, g)
    without = torch.autograd.grad(plain(x, Saving()), (x, plain.router.weight), g)
    for a, b, added in zip(with_balance, without, torch.autograd.grad(0.5 * loss, inputs), strict=True):
        torch.testing.assert_close(a, b + added, rtol=1e-4, atol=1e-5)


def test_a_bias_chooses_but_does_not_weigh() -> None:
    router = Router(MoeSpec(experts=4, top_k=2, ffn_dim=8, router_bias=True), 16)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    assert router.bias is not None
    router.bias += torch.tensor([0.0, 9.0, 0.0, 9.0])
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    routing, _ = router(x)
    assert {tuple(sorted(row)) for row in routing.experts.tolist()} == {(1, 3)}
    scores = F.linear(x, router.weight).sigmoid().gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, scores / scores.sum(1, keepdim=True))


def test_loads_are_counted_once_although_a_layer_is_recomputed() -> None:
    made, x = block("moe-bias")
    made(x, Saving())
    first = made.load.clone()
    assert first.sum() == 2 * TOKENS
    made._build.scale.recomputing = True
    made(x, Saving())
    assert torch.equal(made.load, first)


def test_pairs_are_ordered_by_expert_and_then_by_token() -> None:
    order, source, counts = _by_expert(torch.tensor([[2, 0], [0, 1], [2, 1]]), 4)
    assert source.tolist() == [0, 1, 1, 2, 0, 2]
    assert order.tolist() == [1, 2, 3, 5, 0, 4]
    assert counts.tolist() == [2, 2, 2, 0]


@pytest.mark.parametrize("later", [False, True])
def test_grouped_products_leave_experts_without_rows_a_gradient_of_zero(later: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(3, 6, 4, generator=generator))
    build = Build()
    store = WeightGradients()
    object.__setattr__(build.tp, "gradients", store)
    store.deferring = later
    (out,) = grouped_linear(x, (weight,), [2, 0, 3], build)
    out.sum().backward()
    store.take()()
    rows = [weight[0]] * 2 + [weight[2]] * 3
    wanted = torch.stack([w @ row for w, row in zip(rows, x, strict=True)])
    torch.testing.assert_close(out, wanted)
    right = torch.autograd.grad(wanted.sum(), (x, weight))
    torch.testing.assert_close(x.grad, right[0])
    torch.testing.assert_close(weight.grad, right[1])
