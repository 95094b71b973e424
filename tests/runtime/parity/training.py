"""A few steps of the trainer on random tokens, as each rank of a case runs them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import runtime.assembly
from cost_models.rank_grid import RankGrid
from runtime.assembly import assemble
from runtime.config import parse_config
from runtime.device import open_device
from runtime.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cost_models.layout import Layout
    from runtime.config_values import TrainConfig

BATCH, SEQ_LEN, LR = 8, 64, 1e-3

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""
Sections = dict[str, dict[str, Any]]


def config_of(model: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> TrainConfig:
    """The config of a case; `sections` holds what differs from a plain fp32 run."""
    values: Sections = {
        "model": dict(model),
        "training": {"batch_size": BATCH, "seq_len": SEQ_LEN, "lr": LR},
        "distributed": {},
        "optimization": {"precision": "fp32"},
    }
    for name, changes in sections.items():
        values[name] = values[name] | dict(changes)
    return parse_config(values, "case")


def batches(config: TrainConfig, steps: int) -> list[torch.Tensor]:
    """Random tokens of each step, (global batch, seq_len + 1).

    Under this seed no token of any model here is so undecided between two experts that another order of sums moves it.
    """
    generator = torch.Generator().manual_seed(4)
    shape = (config.workload.global_batch, config.workload.seq_len + 1)
    return [torch.randint(0, config.model.vocab_size, shape, generator=generator) for _ in range(steps)]


def train(
    model: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], steps: int, move_all: bool = False
) -> Curve:
    """Train on this rank; with `move_all` every activation is offloaded, however small."""
    smallest = runtime.assembly.HostStore
    if move_all:
        runtime.assembly.HostStore = partial(smallest, smallest_bytes=0)  # type: ignore[assignment,misc]
    try:
        return train_config(config_of(model, sections), steps)
    finally:
        runtime.assembly.HostStore = smallest  # type: ignore[misc]


def train_config(config: TrainConfig, steps: int) -> Curve:
    """Train on this rank; each rank takes its share of the global batch."""
    device, layout = open_device("cpu", 0), config.layout
    engine = Engine(config, assemble(config, device), device)
    rank = dist.get_rank() if layout.devices > 1 else 0
    dp = RankGrid.of(layout).coordinates(rank).dp
    curve = []
    for whole in batches(config, steps):
        mine = whole.view(layout.accumulation, layout.dp, layout.micro_batch, -1)[:, dp]
        found = engine.step(mine, LR)
        curve.append((found.loss, found.grad_norm))
    return curve


def train_layout(model: Mapping[str, Any], workload: Mapping[str, Any], layout: Layout, steps: int) -> Curve:
    """Train under a layout as it is: no rule is asked, no size derived. `workload` are keys of `training`."""
    config = config_of(model, {"training": dict(workload)})
    return train_config(replace(config, layout=layout), steps)
