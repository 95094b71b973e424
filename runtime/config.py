"""config.yaml: the planner writes it, the trainer reads it.

`load_config` reads a file to a TrainConfig, `config_text` writes one, and the two are inverse. Importing this module is
cheap; pydantic and NumPy are imported when a file is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .config_values import (
    CheckpointOptions,
    CommunicationOptions,
    DatasetOptions,
    NumericsOptions,
    Overrides,
    PlanSummary,
    TrainConfig,
    TrainingOptions,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CheckpointOptions",
    "CommunicationOptions",
    "DatasetOptions",
    "NumericsOptions",
    "Overrides",
    "PlanSummary",
    "TrainConfig",
    "TrainingOptions",
    "config_text",
    "load_config",
    "parse_config",
]


def load_config(path: Path | str | None, overrides: Overrides = (), *, world_size: int | None = None) -> TrainConfig:
    """Read and check a config.yaml.

    Args:
        path: the file; None where everything is in `overrides`.
        overrides: values in place of the file's; an empty value takes a key out, so that it is derived.
        world_size: devices that the run has (torchrun's WORLD_SIZE); None to believe the file.
    """
    from cost_models.yaml_files import read_mapping

    if path is None:
        return parse_config({}, "the options", overrides, world_size=world_size)
    return parse_config(read_mapping(Path(path)), str(path), overrides, world_size=world_size)


def parse_config(
    values: Mapping[str, object], origin: str, overrides: Overrides = (), *, world_size: int | None = None
) -> TrainConfig:
    """Check the content of a config.yaml.

    Args:
        values: what the file holds.
        origin: the file, as complaints should name it; relative paths in it are looked up beside it.
        overrides: as for `load_config`.
        world_size: as for `load_config`.
    """
    from .config_reading import read_config

    return read_config(values, origin, overrides, world_size)


def config_text(config: TrainConfig) -> str:
    """The text of a config.yaml that `load_config` reads back to an equal TrainConfig."""
    from .config_writing import write_config

    return write_config(config)
