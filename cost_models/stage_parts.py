"""What all ranks of a layout share: operators, parameters, shard degrees, and how a layer's backward goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cost_models.layer_backward import BackwardOfLayer, LayerBackward
from cost_models.operators import Shapes
from cost_models.parameters import PartParameters, expert_shard_degree, shard_degree

if TYPE_CHECKING:
    from cost_models.layout import Layouts
    from cost_models.setting import Setting


class ModelParts:
    """Operators, parameters and shard degrees of the layouts."""

    def __init__(self, setting: Setting, layouts: Layouts) -> None:
        table = setting.operator_table(layouts)
        self.dense, self.moe = table.dense_layer(), table.moe_layer()
        self.embedding, self.head = table.embedding(), table.head()
        self.params = PartParameters.of(setting.model, layouts)
        self.shard, self.expert_shard = shard_degree(layouts), expert_shard_degree(layouts)
        self._selective = setting.stack.selective
        workload = setting.workload
        shapes = Shapes.of(layouts, workload)
        made, kept = setting.calibration.softmax_statistics_bytes, setting.stack.statistics_bytes
        made_again = 0.0 if kept is None or made <= kept else made
        self.follower = BackwardOfLayer(setting.model, shapes, workload.numbers.activation_bytes, made_again)
        self._backwards: dict[tuple[str, bool], LayerBackward] = {}

    def backward(self, mode: str, *, sparse: bool) -> LayerBackward:
        """Of a layer that keeps all, or makes again what selective recomputation does.

        Args:
            mode: `none` or `selective`.
            sparse: with routed experts.
        """
        key = (mode, sparse)
        if key not in self._backwards:
            operators = self.moe if sparse else self.dense
            redone = self._selective if mode == "selective" else frozenset[str]()
            self._backwards[key] = self.follower.follow(operators, redone)
        return self._backwards[key]
