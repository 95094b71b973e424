"""The trainer's guard: a layout that the planner would refuse is refused here too, by the same rules and codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster
from cost_models.errors import TitanPlanError
from cost_models.rules import violation
from cost_models.setting import Setting
from cost_models.stack import TITAN

if TYPE_CHECKING:
    from cost_models.cluster import ClusterSpec

    from .config_values import TrainConfig

# Of the cluster the rules read only who made the device; with the kind at hand the file's cluster, which may be a
# path on somebody else's machine, need not be read.
_CLUSTER_OF_KIND: Final = {"npu": "atlas-800t-a2", "cuda": "dgx-h100", "cpu": "local"}


_MENDS: Final = {"D212": "leave zero_stage out, or start more processes; "}


def check_layout(config: TrainConfig, *, kind: str = "") -> None:
    """Refuse a layout that breaks a rule of the planner or a limit of the trainer.

    Args:
        config: what is to run.
        kind: npu, cuda or cpu, where it is known on what; otherwise the config's cluster says, or a CPU.

    Raises:
        TitanPlanError: with the code of the first rule that is broken.
    """
    setting = Setting(
        model=config.model,
        workload=config.workload,
        cluster=_cluster(_CLUSTER_OF_KIND.get(kind) or config.cluster or "local"),
        stack=TITAN,
        calibration=calibration_of("local-cpu"),  # rules are about shapes: constants do not enter
        n_devices=config.world_size,
    )
    broken = violation(setting, config.layout)
    if broken is not None:
        hint = f"{_MENDS.get(broken.code, '')}titan-plan explain {broken.code} tells the rule"
        raise TitanPlanError(broken.code, f"{config.origin}: {config.layout.name}: {broken.reason}", hint)


def _cluster(name: str) -> ClusterSpec:
    try:
        return find_cluster(name)
    except TitanPlanError:  # a file of the user's, which may be on the machine of the planner alone
        return find_cluster(_CLUSTER_OF_KIND["npu"])
