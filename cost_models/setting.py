"""Setting: everything about a prediction but the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cost_models.operators import OperatorTable, Shapes

if TYPE_CHECKING:
    from cost_models.calibration import Calibration
    from cost_models.cluster import ClusterSpec
    from cost_models.layout import Layouts
    from cost_models.model import ModelSpec
    from cost_models.stack import Stack
    from cost_models.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is trained, on what, by which program, with which constants.

    `algorithm`: the collective algorithm forced between nodes, as HCCL_ALGO does; `auto` leaves it to the library.
    """

    model: ModelSpec
    workload: Workload
    cluster: ClusterSpec
    stack: Stack
    calibration: Calibration
    n_devices: int
    algorithm: str = "auto"

    def operator_table(self, layouts: Layouts) -> OperatorTable:
        """The operators of these layouts on this device."""
        return OperatorTable(
            self.model,
            self.workload,
            self.stack,
            Shapes.of(layouts, self.workload),
            softmax_statistics_bytes=self.calibration.softmax_statistics_bytes,
        )
