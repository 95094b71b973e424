"""titan_plan.json: what it says comes back, and a checkpoint that does not fit the run is refused with reasons."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest

from cost_models.errors import TitanPlanError
from runtime.checkpoint_record import RECORD, Record, check_fits, model_differences, read_record, record_text
from runtime.config import parse_config

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.config_values import TrainConfig


def config_of(optimizer: str = "adamw", **model: object) -> TrainConfig:
    values = {"model": {"name": "tiny-moe", **model}, "training": {"batch_size": 8, "optimizer": optimizer}}
    return parse_config(values, "case")


def record_of(config: TrainConfig) -> Record:
    return Record(
        version="1.2",
        run="a",
        serial=3,
        step=500,
        position=4000,
        seed=1,
        seq_len=64,
        dataset_digest="d",
        optimizer=config.workload.optimizer,
        optimizer_steps=499,
        loss_scale=None,
        clean_steps=0,
        layout="tp1",
        device="cpu",
        world_size=1,
        parameters=5,
        model=asdict(config.model),
        files={".metadata": 7},
    )


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = record_of(config_of())
    (tmp_path / RECORD).write_text(record_text(record))
    assert read_record(tmp_path / RECORD) == record


@pytest.mark.parametrize(
    "change", [{"step": "5"}, {"files": []}, {"optimizer": "lion"}, {"loss_scale": "x"}, {"run": 5}, {"format": "1"}]
)
def test_a_record_with_a_wrong_kind_of_value_is_not_whole(tmp_path: Path, change: dict[str, object]) -> None:
    values = json.loads(record_text(record_of(config_of()))) | change
    (tmp_path / RECORD).write_text(json.dumps(values))
    with pytest.raises(ValueError, match="titan_plan"):
        read_record(tmp_path / RECORD)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "step": 5'])
def test_half_a_record_is_not_whole(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(ValueError):  # noqa: PT011 - json's and ours
        read_record(tmp_path / RECORD)


def test_a_later_format_is_told_with_the_version_that_reads_it(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text('{"format": 99, "version": "7.0"}')
    with pytest.raises(TitanPlanError, match=r"C619.*format 99 of titan-plan 7\.0"):
        read_record(tmp_path / RECORD)


def test_the_model_that_was_saved_fits_under_any_name(tmp_path: Path) -> None:
    record = record_of(config_of())
    renamed = replace(record, model={**record.model, "name": "another", "seq_len": 1})
    check_fits(renamed, tmp_path, config_of())


def test_another_model_is_refused_with_the_dimensions_that_differ(tmp_path: Path) -> None:
    with pytest.raises(TitanPlanError) as caught:
        check_fits(record_of(config_of()), tmp_path, config_of(ffn_dim=1024, moe={"top_k": 1}))
    error, saved = caught.value, config_of().model
    assert saved.moe is not None
    assert (error.code, error.exit_code) == ("C618", 2)
    assert f"ffn_dim {saved.ffn_dim} in the checkpoint, 1024 here" in error.message
    assert f"moe.top_k {saved.moe.top_k} in the checkpoint, 1 here" in error.message
    assert "hidden_dim" not in error.message
    assert "output_dir" in error.hint
    assert "resume: false" in error.hint


def test_experts_against_none_are_one_difference() -> None:
    assert model_differences({"moe": {"experts": 8}}, {"moe": None}) == ["moe given in the checkpoint, none here"]


def test_a_dimension_that_an_older_version_did_not_know_does_not_count() -> None:
    assert model_differences({"a": 1, "gone": 3}, {"a": 1, "new": 5}) == []


@pytest.mark.parametrize(("before", "now", "fits"), [("adamw", "adam", True), ("adam", "sgd", False)])
def test_an_optimizer_with_other_state_is_refused(tmp_path: Path, before: str, now: str, *, fits: bool) -> None:
    record = record_of(config_of(before))
    if fits:
        check_fits(record, tmp_path, config_of(now))
        return
    with pytest.raises(TitanPlanError, match="C619"):
        check_fits(record, tmp_path, config_of(now))
    check_fits(replace(record, optimizer_steps=0), tmp_path, config_of(now))
