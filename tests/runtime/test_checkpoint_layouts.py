"""Saved under one layout, resumed under another: every tensor the same to the bit, the next loss to rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.checkpoint_runs import loaded_whole, resumed, saved_whole, straight
from tests.runtime.parity.training import config_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool

# 515 rows split neither over tp nor over data ranks: padding differs from layout to layout, shards are uneven.
ODD = {"name": "tiny", "n_layers": 2, "vocab_size": 515}
TIED = ODD | {"tied_embeddings": True}
MOE = {"name": "tiny-moe", "n_layers": 2}
BIASED = MOE | {"moe": {"router_bias": True}}
FOUR = ODD | {"n_layers": 4}
_KEYS = {
    "tp": "tp_size",
    "pp": "pp_size",
    "vpp": "virtual_pp_size",
    "dp": "dp_size",
    "ep": "ep_size",
    "cp": "cp_size",
    "cp_kind": "cp_kind",
    "schedule": "pp_schedule",
    "shard": "dp_shard_size",
}


def _layout(zero: int = 0, precision: str = "fp32", *, swap: bool = False, **degrees: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401
    return {
        "training": {"seq_len": 16},
        "distributed": {_KEYS[key]: value for key, value in degrees.items()},
        "optimization": {"zero_stage": zero, "precision": precision, "swap_optimizer": swap},
    }


MOVES = {
    "tp2 x dp2 z2 -> dp4 z3": (ODD, _layout(2, tp=2, dp=2), _layout(3, dp=4)),
    "interleaved pp2 -> tp2": (FOUR, _layout(pp=2, vpp=2), _layout(tp=2)),
    "pp2 tied -> dp2": (TIED, _layout(pp=2), _layout(dp=2)),
    "one -> zb-v tied": (TIED | {"n_layers": 4}, _layout(), _layout(pp=2, vpp=2, schedule="zb-v")),
    "ep2 x dp2 z3 -> tp2": (BIASED, _layout(3, ep=2, dp=2), _layout(tp=2)),
    "replicated -> z3": (ODD, _layout(dp=2), _layout(3, dp=2)),
    "swapped z1 -> one": (ODD, _layout(1, dp=2, swap=True), _layout()),
}
HEAVY_MOVES = {
    "dp4 z3 -> tp2 x dp2 z2": (ODD, _layout(3, dp=4), _layout(2, tp=2, dp=2)),
    "half sharded -> cp2": (ODD, _layout(3, dp=4, shard=2), _layout(1, cp=2, cp_kind="ring")),
    "dp2 -> pp2 tied": (TIED, _layout(dp=2), _layout(pp=2)),
    "zb-v tied -> tp2": (TIED | {"n_layers": 4}, _layout(pp=2, vpp=2, schedule="zb-v"), _layout(tp=2)),
    "tp2 -> ep2 x dp4 z3": (BIASED, _layout(tp=2), _layout(3, ep=2, dp=4)),
    "ep4 x tp2 x dp2 z1 -> pp2": (MOE, _layout(1, ep=4, tp=2, dp=2), _layout(pp=2)),
    "one -> swapped z1": (ODD, _layout(), _layout(1, dp=2, swap=True)),
    "bf16 z2 -> fp32": (ODD, _layout(2, "bf16", dp=2), _layout()),
    "fp32 -> bf16 swapped": (ODD, _layout(tp=2), _layout(2, "bf16", dp=2, swap=True)),
}
_ALL = [
    *(pytest.param(*move, id=name) for name, move in MOVES.items()),
    *(pytest.param(*move, id=name, marks=pytest.mark.heavy) for name, move in HEAVY_MOVES.items()),
]


@pytest.mark.parametrize(("model", "before", "after"), _ALL)
def test_a_checkpoint_is_the_same_under_every_layout(
    ranks: RankPool, tmp_path: Path, model: dict[str, Any], before: dict[str, Any], after: dict[str, Any]
) -> None:
    saved = ranks.run(config_of(model, before).world_size, saved_whole, model, before, str(tmp_path), 2)
    loaded = ranks.run(config_of(model, after).world_size, loaded_whole, model, after, str(tmp_path))
    expected, got = ({key: value for whole, _ in found for key, value in whole.items()} for found in (saved, loaded))
    assert expected.keys() == got.keys()
    assert [key for key in expected if not torch.equal(expected[key], got[key])] == []
    assert all(value.count_nonzero() for key, value in got.items() if key.endswith(("weight", "exp_avg")))
    ((loss, norm),), ((loss_after, norm_after),) = saved[0][1], loaded[0][1]
    same_precision = before["optimization"]["precision"] == after["optimization"]["precision"]
    tolerance = 1e-6 if same_precision and before["optimization"]["precision"] == "fp32" else 1e-2
    assert loss_after == pytest.approx(loss, rel=tolerance)
    assert norm_after == pytest.approx(norm, rel=tolerance)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(ODD, _layout(2, "bf16", dp=2), id="dp2 z2 bf16"),
        pytest.param(ODD, _layout(3, "bf16", tp=2, dp=2), id="tp2 x dp2 z3 bf16", marks=pytest.mark.heavy),
        pytest.param(BIASED, _layout(3, ep=2, dp=2), id="ep2 x dp2 z3"),
        pytest.param(TIED, _layout(pp=2), id="pp2 tied", marks=pytest.mark.heavy),
        pytest.param(ODD, _layout(1, "bf16", dp=2, swap=True), id="swapped bf16", marks=pytest.mark.heavy),
    ],
)
def test_the_same_layout_goes_on_to_the_bit(
    ranks: RankPool, tmp_path: Path, model: dict[str, Any], layout: dict[str, Any]
) -> None:
    """The undisturbed run trains on while the checkpoint is written; the resumed one must not notice."""
    world = config_of(model, layout).world_size
    whole = ranks.run(world, straight, model, layout, str(tmp_path), 2, 4)
    again = ranks.run(world, resumed, model, layout, str(tmp_path), 4)
    assert [(2, curve, digest) for curve, digest in whole] == again
