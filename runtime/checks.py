"""What can be wrong with a run before it starts: layout, data, checkpoint, compiler, folder. No rank is met for it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cost_models.errors import TitanPlanError
from cost_models.schedules import SPLIT_BACKWARD

from .checkpoint_files import check_checkpoint
from .data import check_dataset
from .guard import check_layout
from .hf_weights import check_hf
from .metrics_files import make_output_folder

if TYPE_CHECKING:
    from .config_values import TrainConfig


def check_run(config: TrainConfig, kind: str) -> None:
    """Raise the first thing that is wrong.

    Args:
        kind: npu, cuda or cpu.
    """
    check_layout(config, kind=kind)
    _check_compile(config, kind)
    check_dataset(config.training.dataset, config.model.vocab_size)
    # Rank 0 alone writes there, and would leave the others waiting.
    make_output_folder(Path(config.training.output_dir))
    check_checkpoint(config)
    if config.training.checkpoint.load:
        check_hf(config.training.checkpoint.load, config.model)


def _check_compile(config: TrainConfig, kind: str) -> None:
    if not config.numerics.compile:
        return
    if kind == "npu" and find_spec("inductor_npu_ext") is None:
        message = "compile: true on NPUs needs AutoFuse (package inductor_npu_ext), which is not installed"
        raise TitanPlanError(
            "R780", message, "install it with the CANN of this machine, or set optimization.compile: false"
        )
    if config.layout.schedule in SPLIT_BACKWARD:
        message = f"compile: true with schedule {config.layout.schedule}, whose split backward cannot be compiled"
        raise TitanPlanError("R781", message, "set distributed.pp_schedule to 1f1b or interleaved, or compile: false")
