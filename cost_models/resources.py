"""Where the shipped YAML files are: the package `titan_plan_configs`, which is `configs/` of the source tree."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


def configs_dir() -> Traversable:
    """Return the folder with `models/`, `clusters/`, `calibrations/` and `examples/`."""
    try:
        return resources.files("titan_plan_configs")
    except ModuleNotFoundError as error:
        raise TitanPlanError(
            "C614", "the shipped configs are not installed", "run `pip install -e .` in the source tree"
        ) from error
