"""Train: `torchrun ... -m runtime.train --config config.yaml`, or a model and data by name without a file.

All that can be wrong with what was given is found before any process group starts.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

# Ours import torch_npu where it is used; loaded by torch itself, a broken one would break `import torch`.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import click

from cost_models.errors import TitanPlanError

from .train_options import overrides_of, training_options

if TYPE_CHECKING:
    from .config_values import TrainConfig

_USAGE, _DEGREES, _INTERRUPTED = "C617", "T310", 130
_ALIKE = frozenset({"R750", "R752", "R753", "R754", "R755", "R756"})
"""What no input is to blame for, and all ranks meet at the same time."""
_START = "start one for each of its {devices} devices: `torchrun --nproc_per_node={devices} -m runtime.train ...`"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(), help="A config.yaml; options go before what it says.")
@click.option("--set", "sets", multiple=True, metavar="A.B=C", help="Any key of config.yaml; may be repeated.")
@training_options
def command(config: str | None, sets: tuple[str, ...], **given: Any) -> None:  # noqa: ANN401 - texts of options
    """Train a model as config.yaml says; start one process a device by torchrun."""
    from .processes import Process

    process = Process.of(os.environ)
    _run(_config(config, sets, given, process.world_size), process)


def _config(path: str | None, sets: tuple[str, ...], given: dict[str, Any], world_size: int) -> TrainConfig:
    from .config import load_config

    overrides = overrides_of(given, sets, has_file=path is not None, devices=world_size)
    if path is None and not any(key.startswith("model.") for key in overrides):
        raise TitanPlanError(_USAGE, "neither --config nor --model-name", "give one: --config config.yaml")
    try:
        return load_config(path, overrides, world_size=world_size)
    except TitanPlanError as error:
        if error.code != _DEGREES:
            raise
        with suppress(TitanPlanError):
            devices = load_config(path, overrides).world_size
            error.hint = f"{_START.format(devices=devices)}; or {error.hint}"
        raise


def _run(config: TrainConfig, process: Any) -> None:  # noqa: ANN401 - a Process, imported late
    from .checks import check_run

    kind = process.device_kind()
    check_run(config, kind)
    from .trainer import train

    train(config, process, kind)


def main() -> int:
    """Run and return the exit code: 0 done, 1 the run failed, 2 bad input, 3 it did not start, 130 stopped early."""
    try:
        command.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        return _tell(TitanPlanError(_USAGE, " ".join(error.format_message().split()), "see --help"))
    except (KeyboardInterrupt, click.exceptions.Abort):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write("interrupted before the first step; nothing was there to save\n")
        return _INTERRUPTED
    except TitanPlanError as error:
        return _tell(error)
    return 0


def _tell(error: TitanPlanError) -> int:
    """What all ranks meet, the first of each node tells. What one rank meets, that rank tells."""
    alike = error.exit_code == 2 or error.code in _ALIKE
    if not alike or os.environ.get("LOCAL_RANK", "0") == "0":
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.stderr.write(f"error[{error.code}]: {error.message}{hint}\n")
        sys.stderr.flush()
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
