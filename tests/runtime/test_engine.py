"""A step that went wrong leaves the weights alone, and says whose fault it was; a good one tells how experts share."""

from __future__ import annotations

import math

import pytest
import torch

from runtime.assembly import assemble
from runtime.config import parse_config
from runtime.device import open_device
from runtime.engine import Engine


def engine_of(model: str = "tiny", **optimization: object) -> tuple[Engine, torch.Tensor]:
    values = {
        "model": {"name": model},
        "training": {"batch_size": 2, "seq_len": 32},
        "optimization": {"precision": "fp32", **optimization},
    }
    config, device = parse_config(values, "test"), open_device("cpu", 0)
    tokens = torch.randint(0, 512, (2, 1, 33), generator=torch.Generator().manual_seed(0))
    return Engine(config, assemble(config, device), device), tokens


def weights(engine: Engine) -> list[torch.Tensor]:
    return [t.weight.clone() for t in engine.trainables]


def unchanged(engine: Engine, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(t.weight, was) for t, was in zip(engine.trainables, before, strict=True))


def poison(engine: Engine) -> None:
    """One weight of the final norm is no number, in what the model computes with."""
    norm = next(t for t in engine.trainables if t.name == "head.norm.weight")
    (norm.weight if norm.low is None else norm.low)[0] = math.nan


@pytest.mark.parametrize(
    "precision",
    [{"precision": "fp32"}, {"precision": "bf16"}, {"precision": "fp16"}, {"precision": "fp16", "loss_scale": 128}],
)
def test_a_loss_that_is_no_number_ends_the_run_whatever_the_scale(precision: dict[str, object]) -> None:
    engine, tokens = engine_of(**precision)
    poison(engine)
    before, scale = weights(engine), engine.loss_scale.scale
    result = engine.step(tokens, 1e-3)
    assert result.bad_rank == 0
    assert math.isnan(result.loss)
    assert [torch.nan_to_num(w).sum() for w in weights(engine)] == [torch.nan_to_num(w).sum() for w in before]
    assert engine.loss_scale.scale == scale


def test_gradients_that_overflow_lower_a_dynamic_scale_and_skip_the_step() -> None:
    engine, tokens = engine_of(precision="fp16")
    engine.loss_scale.scale = 2.0**40
    before = weights(engine)
    result = engine.step(tokens, 1e-3)
    assert (result.skipped, result.bad_rank) == (True, None)
    assert math.isfinite(result.loss)
    assert engine.loss_scale.scale == 2.0**39
    assert unchanged(engine, before)


def test_gradients_that_overflow_a_fixed_scale_end_the_run() -> None:
    engine, tokens = engine_of(precision="fp16", loss_scale=2.0**40)
    before = weights(engine)
    assert engine.step(tokens, 1e-3).bad_rank == 0
    assert unchanged(engine, before)


def test_experts_that_share_alike_have_a_balance_loss_of_one() -> None:
    """Without router weights every expert has the same score; then the loss is 1 whoever is chosen."""
    engine, tokens = engine_of("tiny-moe")
    with torch.no_grad():
        for trainable in engine.trainables:
            if trainable.name.endswith("router.weight"):
                trainable.weight.zero_()
    assert engine.step(tokens, 0.0).balance == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_balance_loss_is_counted_once_also_under_recomputation(recompute: bool) -> None:
    plain, tokens = engine_of("tiny-moe")
    other, _ = engine_of("tiny-moe", gradient_checkpointing=recompute)
    assert other.step(tokens, 1e-3).balance == pytest.approx(plain.step(tokens, 1e-3).balance, rel=1e-6)


def test_a_dense_model_has_no_balance_loss_and_a_wish_to_stop_comes_back() -> None:
    engine, tokens = engine_of()
    result = engine.step(tokens, 1e-3, stop=True)
    assert result.balance is None
    assert result.stop
