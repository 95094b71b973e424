"""Losses of the trainer that started from a folder of Hugging Face weights, as each rank of a layout computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cost_models.rank_grid import RankGrid
from runtime.assembly import Assembly, assemble
from runtime.config import parse_config
from runtime.config_values import TrainConfig
from runtime.device import TrainDevice, open_device
from runtime.engine import Engine
from runtime.hf_weights import load_hf
from tests.runtime.hf.folders import BATCH, CONFIGS, SEQ_LEN, sequences

Sections = dict[str, dict[str, Any]]


def config_of(folder: Path, sections: Sections | None = None, **model: object) -> TrainConfig:
    """The config of a run whose model is the folder's."""
    values: Sections = {
        "model": {"hf_config": str(folder / "config.json"), **model},
        "training": {"batch_size": BATCH, "seq_len": SEQ_LEN},
        "distributed": {},
        "optimization": {"precision": "fp32"},
    }
    for name, changes in (sections or {}).items():
        values[name] = values[name] | changes
    return parse_config(values, "case")


def opened(config: TrainConfig, folder: Path) -> tuple[Engine, Assembly, TrainDevice]:
    """What a run is made of, with the folder's weights."""
    device = open_device("cpu", 0)
    assembly = assemble(config, device)
    engine = Engine(config, assembly, device)
    load_hf(folder, config, engine.trainables)
    return engine, assembly, device


def engine_of(config: TrainConfig, folder: Path) -> Engine:
    """An engine that holds the folder's weights."""
    return opened(config, folder)[0]


def loss_of(folder: str, name: str, sections: Sections | None = None) -> float:
    """Loss of the first step; weights are not yet changed by then."""
    config = config_of(Path(folder), sections)
    engine, layout = engine_of(config, Path(folder)), config.layout
    rank = dist.get_rank() if layout.devices > 1 else 0
    whole = torch.from_numpy(sequences(CONFIGS[name])).view(layout.accumulation, layout.dp, layout.micro_batch, -1)
    return engine.step(whole[:, RankGrid.of(layout).coordinates(rank).dp], 0.0).loss
