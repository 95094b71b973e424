"""A TrainConfig to the text of config.yaml, each key in its place, the same text every time."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import yaml

from .config_model import model_section
from .config_stages import stage_list

if TYPE_CHECKING:
    from .config_values import CheckpointOptions, DatasetOptions, PlanSummary, TrainConfig

_HEAD: Final = """\
# One training run, for the trainer. lr, warm-up, steps and dataset are placeholders: the planner does not choose them.
# batch_size = micro_batch_size x gradient_accumulation_steps x dp_size; devices = tp x cp x pp x dp.
"""
_PLAN_HEAD: Final = (
    "# What was predicted for the sections above, as they were written; the trainer does not act on it.\n"
)


def write_config(config: TrainConfig) -> str:
    """The text of the file; keys that only say the default of something rare are left out."""
    sections: dict[str, object] = {
        "model": model_section(config.model),
        "training": _training(config),
        "distributed": _distributed(config),
        "optimization": _optimization(config),
        "cluster": _present({"name": config.cluster or None, "devices": config.world_size}),
    }
    text = _HEAD + "".join("\n" + _yaml({name: section}) for name, section in sections.items())
    return text + (f"\n{_PLAN_HEAD}{_yaml({'plan': _plan(config.plan)})}" if config.plan else "")


def _training(config: TrainConfig) -> dict[str, object]:
    options, layout, workload = config.training, config.layout, config.workload
    return _present(
        {
            "batch_size": workload.global_batch,
            "micro_batch_size": layout.micro_batch,
            "gradient_accumulation_steps": layout.accumulation,
            "seq_len": workload.seq_len,
            "lr": options.lr,
            "warmup_steps": options.warmup_steps,
            "max_steps": options.max_steps,
            "epochs": options.epochs,
            "optimizer": workload.optimizer,
            "seed": options.seed,
            "dataset": _dataset(options.dataset),
            "output_dir": options.output_dir,
            "checkpoint": _checkpoint(options.checkpoint),
            "dropout": workload.dropout or None,
            "causal": None if workload.causal else False,
        }
    )


def _dataset(options: DatasetOptions) -> dict[str, object]:
    default = asdict(type(options)())
    return {key: value for key, value in asdict(options).items() if value != default[key] or key == "name"}


def _checkpoint(options: CheckpointOptions) -> dict[str, object]:
    default = asdict(type(options)())
    always = ("interval", "keep", "resume")
    return {key: value for key, value in asdict(options).items() if key in always or value != default[key]}


def _distributed(config: TrainConfig) -> dict[str, object]:
    layout = config.layout
    return _present(
        {
            "tp_size": layout.tp,
            "sequence_parallel": layout.sp,
            "cp_size": layout.cp,
            "cp_kind": layout.cp_kind,
            "ep_size": layout.ep,
            "pp_size": layout.pp,
            "virtual_pp_size": layout.vpp,
            "pp_schedule": layout.schedule,
            "stage_layers": stage_list(layout, config.model.n_layers),
            "dp_size": layout.dp,
            "dp_shard_size": layout.dp_shard,
            "reduce_gradients": layout.reduce_gradients,
            "placement": layout.placement,
            "fuse_gradient": config.communication.fuse_gradient,
            "async_allreduce": config.communication.async_allreduce,
            "comm_algorithm": config.communication.comm_algorithm,
        }
    )


def _optimization(config: TrainConfig) -> dict[str, object]:
    layout, numerics = config.layout, config.numerics
    checkpointing: dict[str, object] = {"none": False, "full": layout.recompute_layers or "full"}
    return _present(
        {
            "precision": config.workload.precision,
            "gradient_checkpointing": checkpointing.get(layout.recompute, layout.recompute),
            "zero_stage": layout.zero,
            "swap_optimizer": layout.swap_optimizer,
            "activation_cpu_offload": layout.activation_offload,
            "gradient_clip": numerics.gradient_clip,
            "loss_scale": numerics.loss_scale,
            "compile": numerics.compile,
            "fused_attention": None if config.workload.fused_attention else False,
        }
    )


def _plan(plan: PlanSummary) -> dict[str, object]:
    values = asdict(plan)
    return {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}


def _present(values: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in values.items() if value is not None}


class _Dumper(yaml.SafeDumper):
    """Lists on one line, maps in lines, nothing by reference."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


_Dumper.add_representer(list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, True))


def _spell_text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
    """Text on one line: PyYAML's other styles fold line breaks, and lose a lone NEL or line separator."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _spell_text)


def _yaml(values: dict[str, object]) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)
