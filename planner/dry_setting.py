"""Under which setting a config is predicted for a dry run, and which ranks are worth running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster
from cost_models.collectives import algorithm_name
from cost_models.errors import TitanPlanError
from cost_models.layout import Layouts
from cost_models.memory import MemoryModel
from cost_models.rank_grid import RankGrid
from cost_models.setting import Setting
from cost_models.stack import TITAN
from planner.answer_json import tool_name
from planner.question import DEFAULT_CLUSTER

if TYPE_CHECKING:
    from cost_models.layout import Layout
    from runtime.config_values import TrainConfig

# Its sizes stand in where those of a config's own cluster are not at hand; tensors do not depend on it.
_STAND_IN, _STAND_IN_DEVICE = "local", "local-cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrySetting:
    """The setting of a config.

    Attributes:
        known: it is that of the config's device; otherwise only what does not depend on the device holds.
        notes: what was assumed, for the user.
    """

    setting: Setting
    known: bool
    notes: tuple[str, ...]


def check_version(config: TrainConfig) -> None:
    """Refuse a plan that another version predicted.

    Raises:
        TitanPlanError: C627.
    """
    if config.plan is None or config.plan.version == tool_name():
        return
    by = config.plan.version[:60] or "an unnamed version"
    message = f"{config.origin} was planned by {by}, this is {tool_name()}"
    raise TitanPlanError("C627", message, "run the search again, or delete the section `plan` to predict it anew")


def setting_of(config: TrainConfig) -> DrySetting:
    """The setting that the search would have; a plan's cluster may be a file on somebody else's machine."""
    notes = list(_edited(config))
    if not config.cluster:
        notes.append(f"{config.origin} names no cluster: {DEFAULT_CLUSTER} is taken")
    try:
        cluster = find_cluster(config.cluster or DEFAULT_CLUSTER)
        calibration, known = calibration_of(cluster.device.name), True
        algorithm = algorithm_name(cluster, config.communication.comm_algorithm)
    except TitanPlanError as error:
        if error.code not in {"C602", "C603", "C613"}:
            raise
        cluster, calibration, known = find_cluster(_STAND_IN), calibration_of(_STAND_IN_DEVICE), False
        algorithm = "auto"
        notes.append(f"{error.message}: whether the tensors fit its devices is not told")
    setting = Setting(
        model=config.model,
        workload=config.workload,
        cluster=cluster,
        stack=TITAN,
        calibration=calibration,
        n_devices=config.world_size,
        algorithm=algorithm,
    )
    return DrySetting(setting=setting, known=known, notes=tuple(notes))


def _edited(config: TrainConfig) -> tuple[str, ...]:
    if config.plan is None or config.plan.layout == config.layout.name:
        return ()
    planned, now = config.plan.layout[:100], config.layout.name
    return (f"{config.origin} was planned as {planned} and now says {now}: that is predicted and run",)


def first_ranks(layout: Layout) -> tuple[int, ...]:
    """The first rank of each pipeline stage."""
    return tuple(int(rank) for rank in RankGrid.of(layout).ranks[:, 0, 0, 0])


def worst_rank(setting: Setting, layout: Layout) -> int:
    """The first rank of the pipeline stage with the highest predicted peak."""
    estimate = MemoryModel(setting, Layouts.of([layout])).estimate()
    return first_ranks(layout)[int(np.asarray(estimate.worst_rank).reshape(-1)[0])]
