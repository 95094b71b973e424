"""Every message that one rank of a layout sends in a training step: kind, group, count and bytes.

What an operator sends is read from the operator table, times micro batches, layers and what recomputation runs again.
A dry run of the trainer counts the same messages, so that prediction and trainer can be held against each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cost_models.layout import Layouts
from cost_models.rank_buckets import BucketTraffic
from cost_models.rank_messages import WORLD, RankGroups, RankMessage, Tally
from cost_models.rank_parameters import chunk_parameters, stage_layers
from cost_models.rank_shards import ShardTraffic, own_numel
from cost_models.schedules import BACKWARD, FORWARD, schedule_actions, stage_rank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cost_models.layout import Layout
    from cost_models.model import ModelSpec
    from cost_models.operator_values import Collective, Operator
    from cost_models.rank_parameters import Parameter
    from cost_models.setting import Setting

__all__ = ["RankMessage", "rank_messages", "recomputed_layers"]

_FP32 = 4
_STEP_NUMBERS = 4
"""Loss, squared norm, the wish to stop and balance loss, in one message over all ranks."""


def rank_messages(setting: Setting, layout: Layout, rank: int) -> tuple[RankMessage, ...]:
    """Messages of one step of our own trainer on one rank, by group and kind.

    Gradients travel in one message a layer, while backward goes on; routing is balanced.
    """
    groups = RankGroups(layout, rank)
    tally = Tally(groups)
    tally.add(WORLD, "all_reduce", _STEP_NUMBERS * _FP32)
    stages = layout.stages_on(groups.at.pp)
    parameters = {stage: chunk_parameters(setting.model, layout, stage) for stage in stages}
    operators = _Operators(setting, layout)
    for stage in stages:
        operators.tell(tally, stage)
        _tell_pipeline(tally, setting, layout, stage)
        _tell_data(tally, setting, groups, stage, parameters[stage])
    everything = [p for stage in stages for p in parameters[stage]]
    _tell_partial(tally, groups, everything)
    if setting.model.tied_embeddings and layout.pp > 1 and layout.schedule != "zb-v":
        _tell_tied(tally, groups, everything)
    return tally.found()


def recomputed_layers(model: ModelSpec, layout: Layout, stage: int) -> range:
    """Layers of a virtual stage whose forward runs again in backward: its first ones."""
    layers = stage_layers(model, layout, stage)
    if layout.recompute != "full":
        return layers[:0]
    return layers[: layout.recompute_layers or len(layers)]


class _Operators:
    """Messages of the operators of a stage, from the table."""

    def __init__(self, setting: Setting, layout: Layout) -> None:
        table = setting.operator_table(Layouts.of([layout]))
        self._model, self._stack, self._x = setting.model, setting.stack, layout
        self._dense, self._moe = table.dense_layer(), table.moe_layer()
        self._embedding, self._head = table.embedding(), table.head()

    def tell(self, tally: Tally, stage: int) -> None:
        """All micro batches of one stage."""
        again = recomputed_layers(self._model, self._x, stage)
        for index in stage_layers(self._model, self._x, stage):
            sparse = index >= self._model.dense_layers
            self._part(tally, self._moe if sparse else self._dense, again=index in again)
            if sparse:
                self._tell_routing(tally, again=index in again)
        if stage == 0:
            self._part(tally, self._embedding)
        if stage == self._x.pp * self._x.vpp - 1:
            self._part(tally, self._head)

    def _part(self, tally: Tally, operators: Iterable[Operator], *, again: bool = False) -> None:
        for op in operators:
            for call in op.collectives:
                redone = again and call.phase == "forward" and not self._skipped(op, call)
                self._call(tally, call, self._x.accumulation * (1 + redone))

    def _skipped(self, op: Operator, call: Collective) -> bool:
        return self._stack.recompute_to_last_saved and (op.last or not call.in_recompute)

    def _call(self, tally: Tally, call: Collective, times: int) -> None:
        n_bytes, count = _number(call.n_bytes), round(_number(call.count)) * times
        kinds = ("send", "recv") if call.kind == "send_recv" else (call.kind,)
        for kind in kinds:
            tally.add(call.dimension, kind, n_bytes, count)

    def _tell_routing(self, tally: Tally, *, again: bool) -> None:
        """Tokens of each expert: over a sequence for the balance loss; over dp once a step to move router biases."""
        moe, x = self._model.moe, self._x
        assert moe is not None  # noqa: S101 - the layer is sparse
        sequence = ("sequence" if x.sp else "cp") if x.cp > 1 else ("tp" if x.sp else "")
        if sequence:
            tally.add(sequence, "all_reduce", x.micro_batch * moe.experts * _FP32, x.accumulation * (1 + again))
        if moe.router_bias:
            tally.add("dp", "all_reduce", moe.experts * _FP32)


def _tell_pipeline(tally: Tally, setting: Setting, layout: Layout, stage: int) -> None:
    """Hidden states to the next stage and their gradients back, unless that stage is on this rank too."""
    own = stage_rank(layout.schedule, layout.pp, stage)
    tokens = layout.micro_batch * setting.workload.seq_len // layout.cp // (layout.tp if layout.sp else 1)
    n_bytes = tokens * setting.model.hidden_dim * setting.workload.numbers.activation_bytes
    for neighbour in (stage - 1, stage + 1):
        if 0 <= neighbour < layout.pp * layout.vpp and stage_rank(layout.schedule, layout.pp, neighbour) != own:
            tally.add("pp", "send", n_bytes, layout.accumulation)
            tally.add("pp", "recv", n_bytes, layout.accumulation)


def _tell_data(
    tally: Tally, setting: Setting, groups: RankGroups, stage: int, parameters: tuple[Parameter, ...]
) -> None:
    numbers, layout = setting.workload.numbers, groups.layout
    if layout.zero == 0:
        BucketTraffic(groups, low_precision=numbers.main_weight_bytes > 0).tell(tally, parameters)
        return
    traffic = ShardTraffic(setting.model, groups, parameters, numbers.weight_bytes, alone=layout.pp * layout.vpp == 1)
    traffic.tell(tally, _actions(layout, groups.at.pp, stage))


def _actions(layout: Layout, pp_rank: int, stage: int) -> list[str]:
    """Kinds of action of one stage in order."""
    if layout.pp == 1:
        return [FORWARD, BACKWARD] * layout.accumulation
    actions = schedule_actions(layout.schedule, layout.pp, layout.vpp, layout.accumulation)[pp_rank]
    return [action.kind for action in actions if action.stage == stage]


def _tell_partial(tally: Tally, groups: RankGroups, parameters: Iterable[Parameter]) -> None:
    """Gradients of which each tp rank has a part, those of this rank's shards, as one message."""
    elements = sum(_own_gradient(groups, p) for p in parameters if p.partial)
    tally.add("tp", "all_reduce", elements * _FP32)


def _tell_tied(tally: Tally, groups: RankGroups, parameters: Iterable[Parameter]) -> None:
    """Both copies of a tied table get the sum of both gradients."""
    tables = [p for p in parameters if p.unit in {"embedding", "head"} and p.name == "weight"]
    for table in tables:
        tally.add("ends", "all_reduce", _own_gradient(groups, table) * _FP32)


def _own_gradient(groups: RankGroups, parameter: Parameter) -> int:
    """Elements of a dense parameter's gradient that this rank updates."""
    return own_numel(parameter.shape, groups.size("dp_shard"), groups.place("dp_shard"))


def _number(column: object) -> float:
    return float(np.asarray(column).reshape(-1)[0])
