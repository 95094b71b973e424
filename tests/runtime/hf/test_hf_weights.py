"""Weights from Hugging Face: the loss that transformers computes, in one process and in every kind of layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.runtime.hf.folders import CONFIGS, weights_of, write_folder
from tests.runtime.hf.golden import GOLDEN, transformers_loss
from tests.runtime.hf.runs import Sections, config_of, engine_of, loss_of

if TYPE_CHECKING:
    from tests.ranks import RankPool

LOSSES: dict[str, float] = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    assert loss_of(str(write_folder(tmp_path, name)), name) == pytest.approx(LOSSES[name], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"rope_theta": 1e4}),
        ("llama", {"rms_norm_eps": 1e-5}),
        ("mistral", {"sliding_window": None}),
        ("qwen2-window", {"use_sliding_window": False}),
    ],
)
def test_the_golden_losses_notice_a_number_that_was_not_taken(
    tmp_path: Path, name: str, change: dict[str, object]
) -> None:
    write_folder(tmp_path, name)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | change))
    assert abs(loss_of(str(tmp_path), name) / LOSSES[name] - 1) > 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_the_golden_losses_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    assert transformers_loss(write_folder(tmp_path, name), name) == pytest.approx(LOSSES[name], rel=1e-6)


def test_files_beside_an_index_are_read_as_one(tmp_path: Path) -> None:
    assert loss_of(str(write_folder(tmp_path, "qwen3-moe", files=3)), "qwen3-moe") == pytest.approx(LOSSES["qwen3-moe"])


def layout(**keys: object) -> Sections:
    found: Sections = {"distributed": {}, "optimization": {}}
    for key, value in keys.items():
        found["optimization" if key in {"zero_stage", "swap_optimizer"} else "distributed"][key] = value
    return found


LAYOUTS = [
    ("llama", layout(tp_size=2)),  # 101 rows over 2: padded
    ("qwen2", layout(dp_size=2, zero_stage=3)),
    ("qwen3-moe", layout(dp_size=2, ep_size=2)),
]
MORE = [
    ("llama-biases", layout(tp_size=2)),
    ("llama-biases", layout(pp_size=2)),  # a tied head on a stage of its own
    ("mistral", layout(tp_size=2, sequence_parallel=False)),
    ("qwen2-moe", layout(tp_size=2)),
    ("mixtral", layout(tp_size=2, ep_size=2)),
    ("mixtral", layout(dp_size=2, zero_stage=1)),
    ("llama", layout(tp_size=2, dp_size=2, zero_stage=3)),  # tp and data ranks cut one axis
    ("qwen3-moe", layout(dp_size=4, ep_size=2, zero_stage=3)),
    ("qwen3", layout(tp_size=2, pp_size=2, swap_optimizer=True)),
    ("qwen2-moe", layout(tp_size=2, dp_size=2, ep_size=4, zero_stage=2)),
]


@pytest.mark.parametrize(
    ("name", "sections"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.heavy) for case in MORE)],
)
def test_every_layout_starts_from_the_same_weights(
    tmp_path: Path, ranks: RankPool, name: str, sections: Sections
) -> None:
    world = config_of(write_folder(tmp_path, name), sections).layout.devices
    for loss in ranks.run(world, loss_of, str(tmp_path), name, sections):
        assert loss == pytest.approx(LOSSES[name], rel=1e-6)


def test_bf16_computes_with_the_weights_that_were_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "llama")
    engine = engine_of(config_of(folder, {"optimization": {"precision": "bf16"}}), folder)
    wanted = torch.from_numpy(weights_of(CONFIGS["llama"])["model.layers.1.mlp.down_proj.weight"])
    (found,) = (t for t in engine.trainables if t.name == "layers.1.mlp.down.weight")
    assert torch.equal(found.weight, wanted)
    assert found.low is not None
    assert torch.equal(found.low, wanted.bfloat16())


def test_rows_behind_the_vocabulary_stay_zero(tmp_path: Path, ranks: RankPool) -> None:
    write_folder(tmp_path, "llama")
    first, last = ranks.run(2, embedding_of, str(tmp_path))
    whole = weights_of(CONFIGS["llama"])["model.embed_tokens.weight"]
    assert first == whole[:51].tolist()
    assert last == [*whole[51:].tolist(), [0.0] * 64]


def embedding_of(folder: str) -> list[list[float]]:
    engine = engine_of(config_of(Path(folder), layout(tp_size=2)), Path(folder))
    return next(t.weight.tolist() for t in engine.trainables if t.name == "embedding.weight")
