"""FLOPs of products and attention that one rank computes in a training step, recomputation in backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cost_models.attention_pairs import biased, biased_pairs, causal_pairs
from cost_models.layout import Layouts
from cost_models.rank_grid import RankGrid
from cost_models.rank_parameters import stage_layers
from cost_models.rank_traffic import recomputed_layers

if TYPE_CHECKING:
    from cost_models.layout import Layout
    from cost_models.operator_values import Operator
    from cost_models.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFlops:
    """FLOPs of a step: two for each multiplication of a product; recomputation is in `backward`."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Of the step."""
        return self.forward + self.backward


def rank_flops(setting: Setting, layout: Layout, rank: int) -> RankFlops:
    """FLOPs of one step of our own trainer on one rank; routing is balanced.

    A loss in chunks computes its gradients in its forward, two products more there and none in backward.
    """
    parts = _Parts(setting, layout)
    forward = backward = 0.0
    for stage in layout.stages_on(RankGrid.of(layout).coordinates(rank).pp):
        again = recomputed_layers(setting.model, layout, stage)
        for index in stage_layers(setting.model, layout, stage):
            part = parts.moe if index >= setting.model.dense_layers else parts.dense
            forward += part.forward
            backward += part.backward + (part.again if index in again else 0.0)
        if stage == layout.pp * layout.vpp - 1:
            forward += parts.head.forward
            backward += parts.head.backward
    return RankFlops(forward=forward * layout.accumulation, backward=backward * layout.accumulation)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """FLOPs of one layer, or of the head, for one micro batch."""

    forward: float
    backward: float
    again: float = 0.0


class _Parts:
    def __init__(self, setting: Setting, layout: Layout) -> None:
        self._s, self._x = setting, layout
        table = setting.operator_table(Layouts.of([layout]))
        self.dense, self.moe = self._layer(table.dense_layer()), self._layer(table.moe_layer())
        gemms = sum(_products(op) for op in table.head())
        in_forward = bool(setting.stack.loss_chunk_tokens)
        self.head = _Part(forward=gemms * (3 if in_forward else 1), backward=0.0 if in_forward else 2 * gemms)

    def _layer(self, operators: tuple[Operator, ...]) -> _Part:
        pairs = self._pairs()
        attention = any(op.name == "attention" for op in operators)
        m = self._s.model
        products = 2.0 * m.n_heads / self._x.tp * self._x.micro_batch * pairs if attention else 0.0
        scores = products * (m.qk_head_dim + m.v_head_dim)
        gemms = sum(_products(op) for op in operators)
        skipped = sum(_products(op) for op in operators if op.last and self._s.stack.recompute_to_last_saved)
        return _Part(
            forward=gemms + scores,
            backward=2 * gemms + products * (3 * m.qk_head_dim + 2 * m.v_head_dim),
            again=gemms - skipped + scores,
        )

    def _pairs(self) -> float:
        """Pairs of query and key of a sequence that the kernel is asked for, the diagonal included."""
        count = biased_pairs if biased(self._s.model) else causal_pairs
        pieces = np.asarray(self._x.cp_kind in {"allgather", "ring"})
        return float(count(self._s.workload.seq_len, np.asarray(float(self._x.cp)), pieces=pieces))


def _products(op: Operator) -> float:
    """FLOPs of an operator's products, forward."""
    return sum(float(np.asarray(2.0 * g.m * g.k * g.n * g.count).reshape(-1)[0]) for g in op.gemms)
