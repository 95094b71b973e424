"""One optimizer step of this rank: micro batches through the model, gradients together, the update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .gradients import clip_factor, scale_gradients, squared_norm, sum_partial
from .loss_scale import LossScale
from .optimizers import Optimizer
from .tied import TiedEmbedding, marked_copies

if TYPE_CHECKING:
    from torch import Tensor

    from .assembly import Assembly
    from .config_values import TrainConfig
    from .device import TrainDevice

BALANCE = 0.01
"""Factor of the balance loss of routed experts (Switch Transformers, arXiv:2101.03961, section 2.2)."""
_BIAS_SPEED = 0.001
"""By how much a router's bias moves a step (arXiv:2412.19437, section 4.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step found out, equal on all ranks.

    Attributes:
        loss: mean over the tokens of the global batch.
        grad_norm: of all gradients before clipping, loss scale taken out.
        skipped: gradients overflowed in fp16; weights are as before.
        bad_rank: lowest rank whose own loss or gradients are not finite where that ends the run; None otherwise.
        stop: some rank was asked to stop.
        balance: mean balance loss over layers and sequences, 1 where experts share evenly; None for a dense model.
    """

    loss: float
    grad_norm: float
    skipped: bool
    bad_rank: int | None = None
    stop: bool = False
    balance: float | None = None


class Engine:
    """Model chunks, gradients and optimizer of this rank."""

    def __init__(self, config: TrainConfig, assembly: Assembly, device: TrainDevice) -> None:
        self._config, self._assembly, self._device = config, assembly, device
        layout, groups = config.layout, assembly.groups
        trainables = assembly.trainables
        apart = config.model.tied_embeddings and layout.pp > 1
        self.trainables = marked_copies(trainables) if apart else trainables
        ends = groups.ends() if apart and groups is not None and layout.schedule != "zb-v" else None
        self._tied = TiedEmbedding(self.trainables, ends) if apart else None
        self.optimizer = Optimizer(
            self.trainables, config.workload.optimizer, config.training.lr, device, swap=layout.swap_optimizer
        )
        self.loss_scale = LossScale.of(config.workload.precision, config.numerics.loss_scale)
        self._tp = groups.tp if groups else None

    def step(self, sequences: Tensor, lr: float, *, stop: bool = False) -> StepResult:
        """Train on one global batch.

        Args:
            sequences: (accumulation, micro batch, seq_len + 1) integers of this dp rank.
            stop: this rank was asked to stop; the result tells all ranks.
        """
        scale = self.loss_scale.scale
        self._set_scales(scale)
        for chunk in self._assembly.chunks:
            chunk.data.begin_step()
        loss = self._forward_backward(*self._cut(sequences))
        for chunk in self._assembly.chunks:
            chunk.data.finish()
        sum_partial(self.trainables, self._tp)
        if self._tied is not None:
            self._tied.sum_gradients()
        result = self._together(loss, scale, stop=stop)
        if result.bad_rank is not None:
            return result
        self.loss_scale.update(overflow=result.skipped)
        if not result.skipped:
            self._update(result.grad_norm, scale, lr)
        return result

    def _update(self, norm: float, scale: float, lr: float) -> None:
        scale_gradients(self.trainables, clip_factor(norm, self._config.numerics.gradient_clip) / scale)
        self.optimizer.step(lr)
        self._move_router_biases()

    def _set_scales(self, loss_scale: float) -> None:
        workload = self._config.workload
        scale = self._assembly.scale
        scale.token = loss_scale / workload.tokens
        scale.balance_sum = None
        if self._config.model.moe is not None:
            scale.balance = BALANCE * loss_scale / workload.global_batch

    def _cut(self, sequences: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and labels of this rank, (micro batches, tokens), sequence first in the tokens."""
        x = sequences.to(self._device.torch_device, non_blocking=True)
        at = self._assembly.positions.to(x.device)
        tokens, labels = x[..., at], x[..., at + 1]
        return tokens.transpose(1, 2).flatten(1), labels.transpose(1, 2).flatten(1)

    def _forward_backward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Scaled loss of what this rank saw; 0 on ranks without the last stage."""
        if self._assembly.pipeline is not None:
            found = self._assembly.pipeline.run(tokens, labels)
            return torch.zeros((), device=tokens.device) if found is None else found
        (chunk,) = self._assembly.chunks
        total = torch.zeros((), device=tokens.device)
        for place in range(tokens.shape[0]):
            loss = chunk.module(tokens[place : place + 1], labels[place : place + 1])
            chunk.data.before_backward(last=place + 1 == tokens.shape[0])
            loss.backward()
            total += loss.detach()
        return total

    def _together(self, loss: Tensor, scale: float, *, stop: bool) -> StepResult:
        """Loss, norm and the wish to stop over all ranks in one message."""
        squared = squared_norm(self.trainables, loss.device)
        wish = torch.tensor(float(stop), device=loss.device)
        found = torch.stack((loss / self._config.layout.tp, squared, wish, self._own_balance(loss)))
        if self._assembly.groups is not None:
            dist.all_reduce(found)
        total, square, wishes, balance = self._device.numbers(found)
        finite = math.isfinite(total) and math.isfinite(square)
        # The loss is summed in full precision: its scale cannot overflow it. Gradients it can, and is then lowered.
        ends = not math.isfinite(total) or (not finite and self.loss_scale.exhausted)
        bad = self._lowest_bad(loss, squared) if ends else None
        norm = math.sqrt(square) / scale if math.isfinite(square) else square
        return StepResult(
            loss=total / scale,
            grad_norm=norm,
            skipped=not finite,
            bad_rank=bad,
            stop=wishes > 0,
            balance=balance if self._config.model.moe else None,
        )

    def _own_balance(self, like: Tensor) -> Tensor:
        """This rank's share of the mean balance loss; without sp all tp ranks saw the same tokens."""
        found, layout = self._assembly.scale.balance_sum, self._config.layout
        if found is None:
            return torch.zeros_like(like)
        alike = 1 if layout.sp else layout.tp
        return found / (alike * self._config.workload.global_batch * max(self._config.model.moe_layers, 1))

    def _lowest_bad(self, loss: Tensor, squared: Tensor) -> int:
        """The lowest rank with a loss, or else with gradients, that are not finite."""
        rank = self._assembly.groups.rank if self._assembly.groups else 0
        world = self._config.layout.devices
        order = rank if not bool(loss.isfinite()) else world + rank if not bool(squared.isfinite()) else 2 * world
        found = torch.tensor(order, device=loss.device)
        if self._assembly.groups is not None:
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found) % world

    def _move_router_biases(self) -> None:
        """Experts with less than their share become likelier (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""
        moe = self._config.model.moe
        if moe is None or not moe.router_bias:
            return
        for chunk in self._assembly.chunks:
            for layer in chunk.module.layers.values():
                move_bias(layer, self._assembly, _BIAS_SPEED)


def move_bias(layer: torch.nn.Module, assembly: Assembly, speed: float) -> None:
    """One layer's router, if it has one: its load is summed over dp, the sign of what is missing moves the bias."""
    from .models.moe import SparseMlp

    if not isinstance(layer.mlp, SparseMlp) or layer.mlp.router.bias is None or not layer.mlp.load.numel():
        return
    load = layer.mlp.load
    if assembly.groups is not None and assembly.groups.dp is not None:
        dist.all_reduce(load, group=assembly.groups.dp)
    layer.mlp.router.bias += speed * (load.mean() - load).sign()
    layer.mlp.load = torch.zeros(0)
