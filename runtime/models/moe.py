"""Routed experts: top-k routing, exchange over ep or cut over tp, and the balance loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from runtime.autograd import apply, apply_talking
from runtime.parallel.collectives import exchange
from runtime.parallel.tensor import copy_to_region, reduce_from_region

from . import activations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from cost_models.model import ModelSpec, MoeSpec
    from runtime.memory.saving import Saving
    from runtime.parallel.weight_gradients import WeightGradients

    from .building import Build


class Routing(NamedTuple):
    """Where each token goes: experts and their weights, (tokens, top_k)."""

    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """Scores of all experts on own tokens; softmax over the chosen ones, or DeepSeek-V3's sigmoid with a bias.

    With a bias (arXiv:2412.19437, section 2.1.2) scores are sigmoids, the bias takes part in the choice alone and is
    moved after each step towards equal load.
    """

    def __init__(self, moe: MoeSpec, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden))
        self.bias: Tensor | None
        # Moved by its own rule, in full precision and alike on all ranks: a buffer, not a parameter of the optimizer.
        self.register_buffer("bias", torch.zeros(moe.experts, device="cpu") if moe.router_bias else None)
        self._top_k = moe.top_k

    def forward(self, x: Tensor) -> tuple[Routing, Tensor]:
        """Routing of own tokens, and each token's share of every expert, (tokens, experts)."""
        logits = F.linear(x, self.weight).float()
        if self.bias is None:
            shares = logits.softmax(-1)
            chosen, experts = shares.topk(self._top_k, dim=-1)
        else:
            scores = logits.sigmoid()
            experts = (scores + self.bias.float()).topk(self._top_k, dim=-1).indices
            chosen, shares = scores.gather(1, experts), scores / scores.sum(-1, keepdim=True)
        weights = chosen / chosen.sum(-1, keepdim=True)
        return Routing(experts, weights.to(x.dtype)), shares


class Experts(nn.Module):
    """The experts' weights on this rank, one batch of matrices for each projection.

    ep > 1: whole experts, (experts / ep, ffn, hidden). ep 1: all experts, cut by tp, (experts, ffn / tp, hidden).
    """

    def __init__(self, model: ModelSpec, experts: int, width: int) -> None:
        super().__init__()
        hidden = model.hidden_dim
        self.gate = nn.Parameter(torch.empty(experts, width, hidden)) if model.gated_mlp else None
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor, weights: Tensor, counts: Tensor, build: Build, saving: Saving) -> Tensor:
        """Rows ordered by expert to their experts' outputs, each times its router weight.

        Args:
            x: (rows, hidden). weights: (rows,). counts: (experts here,) rows of each.
        """
        rows = build.row_counts(counts, x.shape[0])
        if self.gate is None:
            (up,) = grouped_linear(x, (self.up,), rows, build)
            activated = activations.plain(up, weights)
        else:
            gate, up = grouped_linear(x, (self.gate, self.up), rows, build)
            activated = activations.gated(gate, up, weights)
        saving.remake(activated, activations.again)
        (out,) = grouped_linear(activated, (self.down,), rows, build)
        return out


class SparseMlp(nn.Module):
    """Router, routed experts and shared experts."""

    def __init__(self, model: ModelSpec, build: Build) -> None:
        super().__init__()
        moe = model.moe
        assert moe is not None  # noqa: S101 - the layer asked
        from .mlp import Mlp

        self.router = Router(moe, model.hidden_dim)
        local = (
            (moe.experts // build.ep_size, moe.ffn_dim)
            if build.ep_size > 1
            else (moe.experts, moe.ffn_dim // build.tp.size)
        )
        self.experts = Experts(model, *local)
        self.shared = Mlp(model, moe.shared_ffn_dim, build) if moe.shared_ffn_dim else None
        self.shared_gate = nn.Parameter(torch.empty(1, model.hidden_dim)) if moe.shared_gate else None
        self._n_experts, self._top_k = moe.experts, moe.top_k
        self.load = torch.zeros(0)
        self._build = build

    def forward(self, x: Tensor, saving: Saving) -> Tensor:
        """Normed own tokens to the sum of their experts' outputs, (own tokens, hidden)."""
        routing, shares = self.router(x)
        x = self._balanced(x, routing, shares)
        out = self._exchanged(x, routing, saving) if self._build.ep_size > 1 else self._cut(x, routing, saving)
        if self.shared is not None:
            shared = self.shared(x, saving)
            if self.shared_gate is not None:
                shared = shared * F.linear(x, self.shared_gate).sigmoid()
            out = out + shared
        return out

    def _balanced(self, x: Tensor, routing: Routing, shares: Tensor) -> Tensor:
        """Attach the balance loss of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2, sequence-wise) to the tokens.

        For each sequence the sum over experts of (share of tokens sent) x (mean share of score). It is linear in the
        scores once the counts are summed over the ranks that hold the sequence, so every layout gets the same loss.
        """
        build = self._build
        batch = build.micro_batch
        sent = torch.zeros(batch, self._n_experts, device=x.device)
        sequence = torch.arange(x.shape[0], device=x.device) % batch
        index = sequence[:, None] * self._n_experts + routing.experts
        sent.view(-1).index_add_(0, index.reshape(-1), torch.ones(index.numel(), device=x.device))
        if build.sequence is not None:
            dist.all_reduce(sent, group=build.sequence)
        if self.router.bias is not None and not build.scale.recomputing:
            self._count(sent)
        if not build.scale.balance:
            return x
        tokens = sent.sum(1, keepdim=True) / self._top_k
        fraction = sent * (self._n_experts / self._top_k) / tokens
        loss = ((shares.unflatten(0, (-1, batch)).sum(0) / tokens) * fraction).sum()
        build.scale.note_balance(loss.detach())
        out: Tensor = apply(_Attach, x, loss, build.scale.balance)
        return out

    def _count(self, sent: Tensor) -> None:
        """Load of each expert since the last step, for the router's bias."""
        if self.load.numel() == 0:
            self.load = torch.zeros(self._n_experts, device=sent.device)
        self.load += sent.sum(0)

    def _cut(self, x: Tensor, routing: Routing, saving: Saving) -> Tensor:
        """Every expert is cut over tp: all tokens are here, each rank adds its part."""
        tp = self._build.tp
        tokens = copy_to_region(x, tp)
        weights = copy_to_region(routing.weights, tp)
        experts = tp.gather(routing.experts) if tp.sequence else routing.experts
        order, source, counts = _by_expert(experts, self._n_experts)
        rows = self.experts(tokens[source], weights.reshape(-1)[order], counts, self._build, saving)
        return reduce_from_region(_summed(rows, source, tokens.shape[0]), tp)

    def _exchanged(self, x: Tensor, routing: Routing, saving: Saving) -> Tensor:
        """Tokens travel to the ranks of their experts and back."""
        build = self._build
        assert build.ep is not None  # noqa: S101 - the caller branched on it
        order, source, counts = _by_expert(routing.experts, self._n_experts)
        arriving = exchange(counts, build.ep).unflatten(0, (build.ep_size, -1))
        sent = build.row_counts(counts.unflatten(0, (build.ep_size, -1)).sum(1), order.numel())
        received = build.row_counts(arriving.sum(1), order.numel())
        rows = exchange_rows(x[source], build.ep, sent, received)
        weights = exchange_rows(routing.weights.reshape(-1)[order], build.ep, sent, received)
        # Rows come ordered by sender, then expert; the products want them by expert.
        here = torch.arange(arriving.shape[1], device=x.device).repeat(build.ep_size)
        by_expert = torch.argsort(here.repeat_interleave(arriving.reshape(-1), output_size=sum(received)), stable=True)
        out = self.experts(rows[by_expert], weights[by_expert], arriving.sum(0), build, saving)
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(by_expert.numel(), device=x.device)
        home = exchange_rows(out[back], build.ep, received, sent)
        return _summed(home, source, x.shape[0])


def _by_expert(experts: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order of the (token, choice) pairs by expert, the token of each in that order, and pairs of each expert."""
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(n_experts, dtype=torch.int64, device=flat.device)
    return order, order // experts.shape[1], counts.index_add_(0, flat, torch.ones_like(flat))


def _summed(rows: Tensor, source: Tensor, tokens: int) -> Tensor:
    """Rows added up by the token that they belong to."""
    out: Tensor = apply(_Summed, rows, source, tokens)
    return out


class _Summed(torch.autograd.Function):
    """`index_add` into zeros. torch's own keeps the rows too, whose values its backward does not read."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, tokens: int) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(source)
        return rows.new_zeros((tokens, rows.shape[1])).index_add_(0, source, rows)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (source,) = ctx.saved_tensors
        return g.index_select(0, source), None, None


def grouped_linear(x: Tensor, weights: Sequence[nn.Parameter], rows: list[int], build: Build) -> tuple[Tensor, ...]:
    """Each expert's rows times its matrix, for one or more projections that read the same rows.

    Args:
        x: (rows, inputs), ordered by expert.
        weights: each (experts, outputs, inputs).
        rows: of each expert.

    Returns:
        One (rows, outputs) for each projection.
    """
    out: tuple[Tensor, ...] = apply(_GroupedLinear, x, rows, build, *weights)
    return out


def exchange_rows(x: Tensor, group: dist.ProcessGroup | None, sent: list[int], received: list[int]) -> Tensor:
    """All-to-all of rows; gradients travel back the same way."""
    out: Tensor = apply_talking(_ExchangeRows, x, group, sent, received)
    return out


def _expert_gradients(g: Tensor, x: Tensor, shape: torch.Size, rows: list[int]) -> Tensor:
    """Gradients of all experts' matrices; of one without rows they are zero, so that all ranks have as many."""
    out = x.new_zeros(shape)
    for expert, (a, b) in enumerate(zip(g.split(rows), x.split(rows), strict=True)):
        torch.mm(a.t(), b, out=out[expert])
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int], build: Build, *weights: nn.Parameter) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.save_for_backward(x, *weights)
        ctx.rows, ctx.build, ctx.parameters = rows, build, weights
        found = tuple(x.new_empty((x.shape[0], weight.shape[1])) for weight in weights)
        for weight, out in zip(weights, found, strict=True):
            for part, into, w in zip(x.split(rows), out.split(rows), weight.unbind(), strict=True):
                torch.mm(part, w.t(), out=into)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        x, *weights = ctx.saved_tensors
        rows, later, parameters = ctx.rows, ctx.build.tp.gradients, ctx.parameters
        dx = torch.empty_like(x)
        for place, (g, weight) in enumerate(zip(gradients, weights, strict=True)):
            for part, into, w in zip(g.split(rows), dx.split(rows), weight.unbind(), strict=True):
                if place:
                    into.addmm_(part, w)
                else:
                    torch.mm(part, w, out=into)
        shapes = [weight.shape for weight in weights]  # the matrices themselves may be gone later (ZeRO-3)
        if later is not None and later.deferring:
            held = x.detach()  # as in runtime.parallel.tensor
            later.defer(lambda: _deliver_experts(later, parameters, shapes, gradients, held, rows))
            return dx, None, None, *(None for _ in weights)
        found = (_expert_gradients(g, x, shape, rows) for g, shape in zip(gradients, shapes, strict=True))
        return dx, None, None, *found


def _deliver_experts(
    store: WeightGradients,
    parameters: Sequence[nn.Parameter],
    shapes: Sequence[torch.Size],
    gradients: Sequence[Tensor],
    x: Tensor,
    rows: list[int],
) -> None:
    for parameter, shape, g in zip(parameters, shapes, gradients, strict=True):
        store.deliver(parameter, _expert_gradients(g, x, shape, rows))


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:  # noqa: ANN401
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return exchange(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        return exchange(g, ctx.group, ctx.received, ctx.sent), None, None, None


class _Attach(torch.autograd.Function):
    """Identity on the tokens that gives a loss beside them its gradient, on whatever pipeline stage it stands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Any) -> Tensor:  # noqa: ANN401
        ctx.scale, ctx.like = scale, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        return g, torch.full_like(ctx.like, float(ctx.scale)), None
