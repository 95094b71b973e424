"""The trainer's model has exactly the parameters that ModelSpec counts, for every model of the catalogue."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cost_models.catalog import list_models
from cost_models.model import ModelSpec
from runtime.models.attention_kernels import CpuKernel
from runtime.models.building import Build
from runtime.models.decoder import Chunk, Decoder

MODELS = [entry.spec for entry in list_models()]


def count(module: torch.nn.Module) -> int:
    """Parameters, and the routers' biases, which are buffers."""
    parameters = sum(p.numel() for p in module.parameters())
    return parameters + sum(b.numel() for name, b in module.named_buffers() if name.endswith("router.bias"))


def decoder(model: ModelSpec, layers: range, *, first: bool = True, last: bool = True) -> Decoder:
    with torch.device("meta"):
        return Decoder(model, Chunk(layers=layers, first=first, last=last), Build(kernel=CpuKernel()))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_whole_model_has_the_parameters_of_its_spec(model: ModelSpec) -> None:
    # Layers of one kind are alike: one of each kind is built, the others are counted.
    dense = 1 if model.dense_layers else 0
    few = replace(
        model,
        n_layers=dense + (1 if model.moe_layers else 0),
        moe=replace(model.moe, dense_layers=dense) if model.moe else None,
    )
    assert count(decoder(few, range(few.n_layers))) == few.total_params
    left = (model.dense_layers - few.dense_layers) * model.dense_layer_params
    left += (model.moe_layers - few.moe_layers) * model.moe_layer_params
    assert few.total_params + left == model.total_params


def test_all_layers_of_a_small_model_are_built() -> None:
    for model in MODELS:
        if model.name.startswith("tiny"):
            assert count(decoder(model, range(model.n_layers))) == model.total_params


def test_chunks_together_hold_the_model_once() -> None:
    (model,) = (found for found in MODELS if found.name == "tiny")
    parts = [
        decoder(model, range(2), last=False),
        decoder(model, range(2, 3), first=False, last=False),
        decoder(model, range(3, 4), first=False),
    ]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert len(set(names)) == len(names)
    assert sum(map(count, parts)) == model.total_params
