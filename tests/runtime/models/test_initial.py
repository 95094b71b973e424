"""First values follow from the seed and the name: every layout starts from the same model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from runtime.assembly import assemble
from runtime.device import open_device
from tests.runtime.parity.cases import Case, case
from tests.runtime.parity.models import MODELS
from tests.runtime.parity.training import config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.ranks import RankPool


def first_parts(model: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """This rank's part of each parameter."""
    found = assemble(config_of(model, sections), open_device("cpu", 0)).trainables
    return {t.name: t.weight.clone() for t in found}


def whole_of(name: str) -> dict[str, torch.Tensor]:
    return first_parts(MODELS[name], {})


def cut(whole: torch.Tensor, axis: int | None, rank: int, size: int) -> torch.Tensor:
    """Rank's equal part; what is behind the end is zero."""
    if axis is None:
        return whole
    length = -(-whole.shape[axis] // size)
    part = whole.narrow(axis, rank * length, min(length, whole.shape[axis] - rank * length))
    missing = length - part.shape[axis]
    return torch.cat((part, part.new_zeros((missing, *part.shape[1:]))), axis) if missing else part


def tp_axis(name: str) -> int | None:
    if "norm" in name or "router" in name or name.endswith(("out.bias", "down.bias")):
        return None
    if ".experts." in name:
        return 2 if name.endswith("down") else 1
    return 1 if name.endswith(("out.weight", "down.weight")) else 0


@pytest.mark.parametrize("model", ["tiny", "biases", "odd-vocabulary", "tiny-moe"])
def test_tp_ranks_hold_slices_of_the_one_model(ranks: RankPool, model: str) -> None:
    whole = whole_of(model)
    for rank, parts in enumerate(ranks.run(2, first_parts, MODELS[model], case(model, tp=2).sections)):
        assert set(parts) == set(whole)
        for name, part in parts.items():
            assert torch.equal(part, cut(whole[name], tp_axis(name), rank, 2)), name


def test_ep_ranks_hold_experts_of_the_one_model(ranks: RankPool) -> None:
    whole = whole_of("tiny-moe")
    for rank, parts in enumerate(ranks.run(2, first_parts, MODELS["tiny-moe"], case("tiny-moe", dp=2, ep=2).sections)):
        for name, part in parts.items():
            assert torch.equal(part, cut(whole[name], 0 if ".experts." in name else None, rank, 2)), name


STAGED = (case("tied", pp=2), case("six", pp=2, vpp=2, schedule="zb-v", stages=[1, 2, 2, 1]))


@pytest.mark.parametrize("given", STAGED, ids=[c.name for c in STAGED])
def test_pipeline_stages_hold_the_layers_of_the_one_model(ranks: RankPool, given: Case) -> None:
    whole = whole_of(given.model)
    held = ranks.run(2, first_parts, MODELS[given.model], given.sections)
    for parts in held:
        for name, part in parts.items():
            tied = name == "head.weight" and given.model == "tied"
            assert torch.equal(part, whole["embedding.weight" if tied else name]), name
    assert set(whole) <= set().union(*held)


def test_shards_put_together_are_the_one_model(ranks: RankPool) -> None:
    whole = whole_of("tiny")
    held = ranks.run(2, first_parts, MODELS["tiny"], case(dp=2, zero=3).sections)
    for name, value in whole.items():
        parts = [parts[name] for parts in held]
        assert sum(part.numel() for part in parts) == value.numel()
        assert any(torch.equal(torch.cat(parts, axis), value) for axis in range(value.ndim)), name


def test_seeds_and_names_give_different_values_and_the_same_ones_again() -> None:
    one = whole_of("tiny")
    assert torch.equal(one["layers.0.mlp.up.weight"], whole_of("tiny")["layers.0.mlp.up.weight"])
    assert not torch.equal(one["layers.0.mlp.up.weight"], one["layers.1.mlp.up.weight"])
    other = first_parts(MODELS["tiny"], {"training": {"seed": 1}})
    assert not torch.equal(one["layers.0.mlp.up.weight"], other["layers.0.mlp.up.weight"])


def test_deviations_are_gpt2s() -> None:
    values = whole_of("biases")
    assert values["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert values["layers.2.mlp.down.weight"].std().item() == pytest.approx(0.02 / 8**0.5, rel=0.03)
    assert values["layers.2.attention.out.weight"].std().item() == pytest.approx(0.02 / 8**0.5, rel=0.03)
    assert not values["layers.2.mlp.down.bias"].any()
    assert torch.equal(values["head.norm.weight"], torch.ones(128))
