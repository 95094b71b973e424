"""The layouts that are held against one process, written short: `case(tp=2, pp=2, schedule="zero-bubble", zero=2)`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from tests.runtime.parity.models import MODELS
from tests.runtime.parity.training import BATCH, Sections, config_of

_KEYS: Final = {
    "batch": "training.batch_size",
    "micro_batch": "training.micro_batch_size",
    "optimizer": "training.optimizer",
    "tp": "distributed.tp_size",
    "sp": "distributed.sequence_parallel",
    "cp": "distributed.cp_size",
    "cp_kind": "distributed.cp_kind",
    "ep": "distributed.ep_size",
    "pp": "distributed.pp_size",
    "vpp": "distributed.virtual_pp_size",
    "schedule": "distributed.pp_schedule",
    "stages": "distributed.stage_layers",
    "dp": "distributed.dp_size",
    "shard": "distributed.dp_shard_size",
    "reduce": "distributed.reduce_gradients",
    "placement": "distributed.placement",
    "fuse": "distributed.fuse_gradient",
    "overlap": "distributed.async_allreduce",
    "zero": "optimization.zero_stage",
    "recompute": "optimization.gradient_checkpointing",
    "swap": "optimization.swap_optimizer",
    "offload": "optimization.activation_cpu_offload",
    "precision": "optimization.precision",
    "loss_scale": "optimization.loss_scale",
    "clip": "optimization.gradient_clip",
}
# What the single process must share with the layout to give the same numbers.
_SHARED: Final = ("batch", "optimizer", "precision", "loss_scale", "clip")
_NOT_IN_NAME: Final = ("batch", "optimizer", "fuse", "overlap", "precision", "loss_scale", "clip")


def sections_of(keys: dict[str, Any]) -> Sections:
    """Short keys as the sections of a config.yaml."""
    sections: Sections = {}
    for key, value in keys.items():
        section, _, name = _KEYS[key].partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layout of one model.

    Attributes:
        world: ranks.
        move_all: offload tensors however small; else most of these models' activations would stay.
    """

    model: str
    sections: Sections = field(hash=False)
    reference: Sections = field(hash=False)
    world: int
    name: str
    move_all: bool = False


def case(model: str = "tiny", *, move_all: bool = False, **keys: Any) -> Case:  # noqa: ANN401
    """A case by short keys; few micro batches where none are asked for, since each one costs gloo's latency."""
    dp, pp = keys.get("dp", 1), keys.get("pp", 1)
    micro_batches = 2 if pp == 1 else 2 * pp
    sections = sections_of({"micro_batch": max(BATCH // (dp * micro_batches), 1), **keys})
    config = config_of(MODELS[model], sections)
    marks = [f"{key}={keys[key]}" for key in _NOT_IN_NAME if key in keys] + ["all"] * move_all
    return Case(
        model=model,
        sections=sections,
        reference=sections_of({key: keys[key] for key in _SHARED if key in keys}),
        world=config.layout.devices,
        name="-".join((model, config.layout.name, *marks)),
        move_all=move_all,
    )
