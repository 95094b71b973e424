"""`python -m runtime.hf_export --config config.yaml -o FOLDER`: a trained model for transformers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

# A broken torch_npu would break `import torch`; nothing here needs a device.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import click

from cost_models.errors import TitanPlanError

from .checkpoint_files import checkpoint_folder, whole_checkpoints
from .checkpoint_record import RECORD
from .config import load_config

_USAGE: Final = "C617"
_INTERRUPTED: Final = 130
_UNUSABLE: Final = "C663"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", required=True, type=click.Path(), help="The config.yaml of the run.")
@click.option("--checkpoint", type=click.Path(), help="A step's folder, or one of several; the newest is taken.")
@click.option("-o", "--output", required=True, type=click.Path(), help="Folder to write; must not exist.")
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True, help="Of the weights.")
def command(config: str, checkpoint: str | None, output: str, dtype: str) -> None:
    """Write a trained model as Hugging Face safetensors."""
    from .hf_writing import export_hf

    read = load_config(config)
    step = newest_step(Path(checkpoint) if checkpoint else checkpoint_folder(read))
    written = export_hf(step, read, Path(output), dtype)
    size = f"{written.total_bytes / 1e9:.3g} GB in {len(written.files)} file{'s' * (len(written.files) > 1)}"
    click.echo(f"{written.folder}: {written.family.architecture}, {size}", err=True)


def newest_step(folder: Path) -> Path:
    """The folder itself where it is one step's, else the newest whole step in it."""
    if (folder / RECORD).is_file():
        return folder
    steps = whole_checkpoints(folder)
    if not steps:
        raise TitanPlanError(_UNUSABLE, f"{folder} holds no checkpoint", "--checkpoint names a folder step-XXXXXXXX")
    return steps[0].path


def main(arguments: list[str] | None = None) -> int:
    """Run and return the exit code: 0 done, 2 bad input, 130 interrupted."""
    try:
        command.main(arguments, prog_name="runtime.hf_export", standalone_mode=False)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        return _tell(TitanPlanError(_USAGE, " ".join(error.format_message().split()), "see --help"))
    except (KeyboardInterrupt, click.exceptions.Abort):
        return _INTERRUPTED
    except TitanPlanError as error:
        return _tell(error)
    return 0


def _tell(error: TitanPlanError) -> int:
    hint = f"\nhint: {error.hint}" if error.hint else ""
    click.echo(f"error[{error.code}]: {error.message}{hint}", err=True)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
