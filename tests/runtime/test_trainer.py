"""The trainer as processes of its own: what a run leaves behind, when it ends, and that it goes on where it was."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from runtime.config import load_config
from runtime.trainer import _total_steps, learning_rate
from tests.runtime.hf.folders import write_folder
from tests.runtime.train_processes import TINY, Trainers, curve, rows

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = "step,loss,grad_norm,learning_rate,step_time_s,tokens_per_s_per_device,mfu,memory_gib"
STEP_LINE = re.compile(
    r"^step +\d+/\d+  loss +[\d.]+  grad norm +[\d.]+  lr \d\.\d\de[-+]\d\d +[\d,.]+ tok/s/device  +[\d.]+ GiB  "
    r"[\d.]+ s$"
)
FP32 = (*TINY, "--precision", "fp32")


def every(steps: int) -> tuple[str, str]:
    return ("--set", f"training.checkpoint.interval={steps}")


def steps_kept(output: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-*"))


def test_a_run_leaves_its_metrics_its_checkpoint_and_tensorboard_files(trainers: Trainers, tmp_path: Path) -> None:
    (rank,) = trainers.run([*TINY, "--max-steps", 5, "--warmup-steps", 4, "--output-dir", tmp_path])
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8").splitlines()[0] == COLUMNS
    found = rows(tmp_path)
    assert [row["step"] for row in found] == ["1", "2", "3", "4", "5"]
    assert [float(row["learning_rate"]) for row in found] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    assert all(float(row["tokens_per_s_per_device"]) * float(row["step_time_s"]) == pytest.approx(32) for row in found)
    assert float(found[4]["loss"]) < float(found[0]["loss"])
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert steps_kept(tmp_path) == [5]
    lines = rank.said.splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["model", "layout", "batch", "numbers", "data", "output"]
    assert len(lines) == 12, rank.said
    assert lines[-1].startswith("done: 5 steps")
    assert all(STEP_LINE.match(line) for line in lines[6:-1]), rank.said
    assert rank.answered == ""


def test_only_the_first_rank_talks(trainers: Trainers, tmp_path: Path) -> None:
    first, second = trainers.run([*TINY, "--max-steps", 2, "--output-dir", tmp_path], world=2)
    assert "layout  tp1-pp1-dp2-mbs2-z2 on 2 cpu devices" in first.said
    assert "step 2/2" in first.said
    assert (second.said, second.answered) == ("", "")


def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(trainers: Trainers, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = (*TINY, *every(2), "--warmup-steps", 5)
    trainers.run([*options, "--max-steps", 6, "--output-dir", whole])
    trainers.run([*options, "--max-steps", 3, "--output-dir", parts])
    (rank,) = trainers.run([*options, "--max-steps", 6, "--output-dir", parts])
    assert "resumed at step 3" in rank.said
    assert curve(parts) == curve(whole)
    assert steps_kept(parts) == [4, 6]


def test_a_run_that_is_done_is_done_at_once(trainers: Trainers, tmp_path: Path) -> None:
    command = [*TINY, "--max-steps", 2, "--output-dir", tmp_path]
    trainers.run(command)
    before = curve(tmp_path)
    (rank,) = trainers.run(command)
    assert "resumed at step 2" in rank.said
    assert "step 2/2" not in rank.said
    assert curve(tmp_path) == before


def test_a_run_goes_on_under_another_layout(trainers: Trainers, tmp_path: Path) -> None:
    moved, stayed = tmp_path / "moved", tmp_path / "stayed"
    tensor = (*FP32, *every(3), "--set", "training.batch_size=4", "--set", "distributed.tp_size=2")
    data = (*FP32, *every(3), "--set", "training.batch_size=4", "--zero-stage", "3")
    trainers.run([*tensor, "--max-steps", 6, "--output-dir", stayed], world=2)
    trainers.run([*tensor, "--max-steps", 3, "--output-dir", moved], world=2)
    first, _ = trainers.run([*data, "--max-steps", 6, "--output-dir", moved], world=2)
    assert "layout was tp2-pp1-dp1-mbs2-z0, the checkpoint is cut anew for tp1-pp1-dp2-mbs2-z3" in first.said
    for one, other in zip(curve(moved), curve(stayed), strict=True):
        assert [float(cell) for cell in one] == pytest.approx([float(cell) for cell in other], rel=1e-5)
        assert float(one[1]) == pytest.approx(float(other[1]), rel=1e-6)


def test_sigterm_to_one_rank_saves_on_all_and_the_same_command_goes_on(trainers: Trainers, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command = [*TINY, "--zero-stage", "0", "--max-steps", 300]
    ranks = trainers.start([*command, "--output-dir", parts], world=2)
    ranks[0].wait_for("step   3/300")
    ranks[1].send(signal.SIGTERM)
    assert [rank.code for rank in ranks] == [130, 130]
    (at,) = steps_kept(parts)
    assert at >= 3
    assert f"stopped at step {at} as asked; the same command goes on from there" in ranks[0].said
    until = ["--max-steps", at + 2]
    trainers.run([*command, *until, "--output-dir", parts], world=2)
    trainers.run([*command, *until, "--output-dir", whole], world=2)
    assert len(curve(parts)) == at + 2
    assert curve(parts) == curve(whole)


def test_without_checkpoints_a_stop_says_that_nothing_is_kept(trainers: Trainers, tmp_path: Path) -> None:
    (rank,) = trainers.start([*TINY, *every(0), "--max-steps", 3000, "--output-dir", tmp_path])
    rank.wait_for("step    2/3000")
    rank.send(signal.SIGTERM)
    assert rank.code == 130
    assert "without a checkpoint (checkpoint.interval 0)" in rank.said
    assert not (tmp_path / "checkpoints").exists()


def test_ctrl_c_ends_at_once_without_a_traceback(trainers: Trainers, tmp_path: Path) -> None:
    (rank,) = trainers.start([*TINY, "--max-steps", 3000, "--output-dir", tmp_path])
    rank.wait_for("step    2/3000")
    rank.send(signal.SIGINT)
    assert rank.code == 130
    assert "Traceback" not in rank.said


def test_what_saves_memory_does_not_change_the_numbers(trainers: Trainers, tmp_path: Path) -> None:
    plain, saving = tmp_path / "plain", tmp_path / "saving"
    command = [*FP32, *every(0), "--max-steps", 3]
    trainers.run([*command, "--output-dir", plain])
    (rank,) = trainers.run(
        [*command, "--gradient-checkpointing", "--activation-cpu-offload", "--swap-optimizer", "--output-dir", saving]
    )
    assert "layout  tp1-pp1-dp1-mbs2-z0-full-swap-offload" in rank.said
    assert curve(saving) == curve(plain)


def test_training_starts_from_hugging_face_weights(trainers: Trainers, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", "llama")
    options = ("--set", f"model.hf_config={folder / 'config.json'}", "--set", f"training.checkpoint.load={folder}")
    np.save(tmp_path / "data.npy", np.arange(400) % 97)
    command = [
        *options, "--precision", "fp32", "--seq-len", 16, "--batch-size", 2, "--dataset-path", tmp_path / "data.npy",
        "--max-steps", 2, "--output-dir", tmp_path / "out",
    ]  # fmt: skip
    (rank,) = trainers.run(command)
    assert f"weights from {folder}" in rank.said
    (again,) = trainers.run([*command, "--max-steps", 3])
    assert "resumed at step 2" in again.said
    assert "weights from" not in again.said


def test_the_learning_rate_rises_to_its_value_and_stays() -> None:
    config = load_config(None, {"model.name": "tiny", "training.lr": 0.5, "training.warmup_steps": 4})
    assert [learning_rate(config, step) for step in (1, 2, 4, 5, 900)] == [0.125, 0.25, 0.5, 0.5, 0.5]
    flat = replace(config, training=replace(config.training, warmup_steps=0))
    assert learning_rate(flat, 1) == 0.5


@pytest.mark.parametrize(
    ("ends", "steps"),
    [
        ({"max_steps": 7}, 7),
        ({"epochs": 3}, 30),
        ({"epochs": 3, "max_steps": 7}, 7),
        ({"epochs": 3, "max_steps": 40}, 30),
    ],
)
def test_a_run_ends_at_what_comes_first(ends: dict[str, int], steps: int) -> None:
    given = {f"training.{name}": value for name, value in ends.items()}
    config = load_config(None, {"model.name": "tiny", "training.batch_size": 8, **given})
    assert _total_steps(config, n_sequences=80) == steps


def test_an_epoch_of_the_demo_ends_by_itself(trainers: Trainers, tmp_path: Path) -> None:
    """39,105 tokens: 305 sequences of 128, of which 76 make a step."""
    command = ["--model-name", "tiny", "--batch-size", 76, "--epochs", 1, *every(0), "--output-dir", tmp_path]
    (rank,) = trainers.run(command)
    assert "step 4/4" in rank.said
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3", "4"]


@pytest.mark.heavy
def test_compiled_layers_train_as_the_others_do(trainers: Trainers, tmp_path: Path) -> None:
    command = [*FP32, *every(0), "--max-steps", 3]
    trainers.run([*command, "--output-dir", tmp_path / "plain"])
    (rank,) = trainers.start([*command, "--compile", "--output-dir", tmp_path / "compiled"])
    rank.wait_for("step 3/3", most_s=400)
    assert rank.code == 0
    for one, other in zip(curve(tmp_path / "compiled"), curve(tmp_path / "plain"), strict=True):
        assert [float(cell) for cell in one] == pytest.approx([float(cell) for cell in other], rel=1e-4)
