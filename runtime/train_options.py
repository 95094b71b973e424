"""The trainer's command line: flags that stand for keys of config.yaml, and what a run without a file needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])
_MOST: Final = 2**20
"""Of ranks."""


class Flag(NamedTuple):
    """One option.

    Attributes:
        key: of config.yaml.
        bare: value of the flag alone; empty where it needs one.
    """

    name: str
    key: str
    help: str
    bare: str = ""


FLAGS: Final = (
    Flag("--model-name", "model.name", "Model of the catalogue, such as llama2."),
    Flag("--model-size", "model.size", "Its size, such as 7B."),
    Flag("--dataset-name", "training.dataset.name", "`demo`, a file or folder, or ORG/NAME of the Hugging Face Hub."),
    Flag("--dataset-path", "training.dataset.path", "File or folder of the data."),
    Flag("--tokenizer", "training.dataset.tokenizer", "File or folder of the tokenizer; bytes by default."),
    Flag("--batch-size", "training.batch_size", "With --config the global batch; without, sequences of each device."),
    Flag("--micro-batch-size", "training.micro_batch_size", "Sequences of a device at a time."),
    Flag("--seq-len", "training.seq_len", "Tokens of a sequence."),
    Flag("--lr", "training.lr", "Learning rate, such as 1e-4."),
    Flag("--warmup-steps", "training.warmup_steps", "Steps in which the learning rate rises to --lr."),
    Flag("--max-steps", "training.max_steps", "Steps after which the run ends."),
    Flag("--epochs", "training.epochs", "Passes over the data after which the run ends."),
    Flag("--seed", "training.seed", "Of the first weights and of the order of the data."),
    Flag("--output-dir", "training.output_dir", "Folder of checkpoints, metrics.csv and TensorBoard files."),
    Flag(
        "--gradient-checkpointing",
        "optimization.gradient_checkpointing",
        "Recompute activations: true (the flag alone), selective, or a number of layers a stage.",
        bare="true",
    ),
    Flag("--zero-stage", "optimization.zero_stage", "0 to 3."),
    Flag("--fuse-gradient", "distributed.fuse_gradient", "Gradients travel in large messages.", bare="true"),
    Flag("--async-allreduce", "distributed.async_allreduce", "Gradients travel while backward goes on.", bare="true"),
    Flag("--precision", "optimization.precision", "bf16, fp16 or fp32."),
    Flag("--gradient-clip", "optimization.gradient_clip", "Largest norm of all gradients; 0 for no clipping."),
    Flag("--loss-scale", "optimization.loss_scale", "Fixed scale of fp16's loss; without it the scale is dynamic."),
    Flag("--swap-optimizer", "optimization.swap_optimizer", "Optimizer state lives in host memory.", bare="true"),
    Flag(
        "--activation-cpu-offload",
        "optimization.activation_cpu_offload",
        "Activations wait for backward in host memory.",
        bare="true",
    ),
    Flag("--compile", "optimization.compile", "torch.compile each layer.", bare="true"),
)


def training_options(command: _Command) -> _Command:
    """Attach all of `FLAGS` to a click command; each arrives as text, or as None."""
    for flag in reversed(FLAGS):
        alone: dict[str, Any] = {"is_flag": False, "flag_value": flag.bare} if flag.bare else {}
        command = click.option(
            flag.name, _field(flag), metavar="[VALUE]" if flag.bare else "VALUE", help=flag.help, **alone
        )(command)
    return command


def overrides_of(
    given: Mapping[str, object], sets: tuple[str, ...], *, has_file: bool, devices: int
) -> dict[str, object]:
    """What the command line says, as keys of config.yaml; `--set` goes before flags.

    Args:
        given: values of the options, by field.
        has_file: a config.yaml is read beneath them.
        devices: ranks of the run.
    """
    found: dict[str, object] = {flag.key: given[_field(flag)] for flag in FLAGS if given.get(_field(flag)) is not None}
    told = dict(_pair(item) for item in sets)
    return {**(found if has_file else _without_file(found, devices // _unsharded(told))), **told}


def _pair(item: str) -> tuple[str, str]:
    key, sign, value = item.partition("=")
    if not sign:
        raise click.BadParameter(f"{item!r} has no value; write it as training.lr=1e-4", param_hint="--set")
    return key.strip(), value


def _unsharded(told: Mapping[str, str]) -> int:
    """Ranks of which none has a copy of what another holds. What is no number is told when the values are read."""
    degrees = (told.get(key, "").strip() for key in ("distributed.tp_size", "distributed.pp_size"))
    return math.prod(int(text) for text in degrees if text.isdecimal() and 0 < int(text) < _MOST)


def _without_file(found: dict[str, object], copies: int) -> dict[str, object]:
    """The users' guide: `--batch-size` is of each device. State is sharded, since whole copies fit few models."""
    if "training.batch_size" in found:
        of_device = found.pop("training.batch_size")
        micro = found.setdefault("training.micro_batch_size", of_device)
        if micro != of_device:
            found["training.gradient_accumulation_steps"] = _accumulation(str(of_device), str(micro))
    if copies > 1:
        found.setdefault("optimization.zero_stage", "2")
    return found


def _accumulation(of_device: str, micro: str) -> int:
    """How often a device takes `--micro-batch-size` for its `--batch-size`."""
    numbers = [text.strip() for text in (of_device, micro)]
    if all(text.isdecimal() and int(text) for text in numbers) and int(numbers[0]) % int(numbers[1]) == 0:
        return int(numbers[0]) // int(numbers[1])
    message = f"{of_device!r} does not split into --micro-batch-size {micro!r}; without --config it is of each device"
    raise click.BadParameter(message, param_hint="--batch-size")


def _field(flag: Flag) -> str:
    return flag.name.removeprefix("--").replace("-", "_")
