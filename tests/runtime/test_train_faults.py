"""What ends a run in the middle, done to real processes: bad numbers, dead ranks, full disks, taken ports."""

from __future__ import annotations

import re
import signal
import socket
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from runtime.checkpoint_files import whole_checkpoints
from tests.runtime.hf.folders import write_folder
from tests.runtime.train_faults import BAD_STEP, LARGE_SCALE
from tests.runtime.train_processes import TINY, Trainers, curve, rows

if TYPE_CHECKING:
    from pathlib import Path

FP32 = (*TINY, "--precision", "fp32")
EACH_STEP = ("--set", "training.checkpoint.interval=1")


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_loss_that_is_no_number_names_step_and_rank_and_leaves_the_checkpoint_alone(
    trainers: Trainers, tmp_path: Path
) -> None:
    command = [*FP32, "--zero-stage", "0", "--max-steps", 9, *EACH_STEP, "--output-dir", tmp_path]
    first, second = trainers.run(command, world=2, fault="nan_on_rank_1", code=1)
    message = f"error[R750]: loss of step {BAD_STEP} is not finite on rank 1 (precision fp32)"
    assert first.said.count(message) == 1
    assert "training.lr" in first.said
    assert second.said == ""
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2"]
    assert [found.record.step for found in whole_checkpoints(tmp_path / "checkpoints")] == [2, 1]
    trainers.run([*command, "--max-steps", 3], world=2)
    undisturbed = [*command, "--max-steps", 3, "--output-dir", tmp_path / "undisturbed"]
    trainers.run(undisturbed, world=2)
    assert curve(tmp_path) == curve(tmp_path / "undisturbed")


def test_a_learning_rate_out_of_all_bounds_ends_the_run(trainers: Trainers, tmp_path: Path) -> None:
    (rank,) = trainers.run([*FP32, "--lr", "1e30", "--max-steps", 9, "--output-dir", tmp_path], code=1)
    assert re.search(r"error\[R750\]: loss of step \d is not finite on rank 0", rank.said)
    assert "Traceback" not in rank.said
    assert not whole_checkpoints(tmp_path / "checkpoints")


def test_a_dynamic_scale_is_halved_at_an_overflow_and_training_goes_on(trainers: Trainers, tmp_path: Path) -> None:
    command = [*TINY, "--precision", "fp16", "--max-steps", 40, "--output-dir", tmp_path]
    (rank,) = trainers.run(command, fault="large_first_scale")
    lines = [line for line in rank.said.splitlines() if line.startswith("step")]
    skipped = ["skipped" in line for line in lines]
    assert all(skipped[:10])
    assert not all(skipped)
    # Each line tells the scale of the step after it.
    expected = [LARGE_SCALE / 2 ** sum(skipped[: n + 1]) for n in range(40)]
    assert [float(line.rpartition("scale ")[2]) for line in lines] == pytest.approx(expected, rel=1e-5)
    losses = [float(row["loss"]) for row in rows(tmp_path)]
    assert losses[-1] < losses[skipped.index(False)]
    record = whole_checkpoints(tmp_path / "checkpoints")[0].record
    assert (record.loss_scale, record.optimizer_steps) == (expected[-1], 40 - sum(skipped))


def test_a_fixed_scale_that_is_too_high_says_so(trainers: Trainers, tmp_path: Path) -> None:
    command = [*TINY, "--precision", "fp16", "--loss-scale", 2.0**40, "--max-steps", 4, "--output-dir", tmp_path]
    (rank,) = trainers.run(command, code=1)
    assert "error[R750]: loss of step 1 is not finite on rank 0 (precision fp16, loss scale 1.09951e+12)" in rank.said
    assert "a lower loss scale (optimization.loss_scale: 128, or dynamic)" in rank.said


def test_a_killed_rank_ends_the_others_and_the_same_command_goes_on(trainers: Trainers, tmp_path: Path) -> None:
    command = [*FP32, "--max-steps", 3000, "--set", "training.checkpoint.interval=2", "--output-dir", tmp_path / "out"]
    ranks = trainers.start(command, world=2, environ={"TITAN_PLAN_TIMEOUT_S": "20"})
    ranks[0].wait_for("step    5/3000")
    killed = time.monotonic()
    ranks[1].send(signal.SIGKILL)
    assert [rank.code for rank in ranks] == [1, -signal.SIGKILL]
    assert time.monotonic() - killed < 40
    assert re.search(r"^error\[R76[34]\]: rank 0 of 2: ", ranks[0].said, re.MULTILINE), ranks[0].said
    assert "Traceback" not in ranks[0].said
    at = whole_checkpoints(tmp_path / "out" / "checkpoints")[0].record.step
    again = trainers.run([*command, "--max-steps", at + 2], world=2)
    assert f"resumed at step {at}" in again[0].said
    trainers.run([*command, "--max-steps", at + 2, "--output-dir", tmp_path / "undisturbed"], world=2)
    assert curve(tmp_path / "out") == curve(tmp_path / "undisturbed")


def test_a_run_that_was_killed_at_any_time_goes_on(trainers: Trainers, tmp_path: Path) -> None:
    command = [*TINY, *EACH_STEP, "--max-steps", 3000, "--output-dir", tmp_path / "out"]
    for words in ("step    4/3000", "step    9/3000"):
        (rank,) = trainers.start(command)
        rank.wait_for(words)
        rank.send(signal.SIGKILL)
        assert rank.code == -signal.SIGKILL
    trainers.run([*command, "--max-steps", 12])
    trainers.run([*command, "--max-steps", 12, "--output-dir", tmp_path / "undisturbed"])
    assert curve(tmp_path / "out") == curve(tmp_path / "undisturbed")


def test_a_full_disk_is_told_and_training_goes_on_beside_the_last_good_checkpoint(
    trainers: Trainers, tmp_path: Path
) -> None:
    command = [*TINY, *EACH_STEP, "--output-dir", tmp_path]
    trainers.run([*command, "--max-steps", 2])
    (good,) = [found for found in whole_checkpoints(tmp_path / "checkpoints") if found.record.step == 2]
    before = content(good.path)
    (rank,) = trainers.run([*command, "--max-steps", 5], fault="small_files", code=1)
    assert rank.said.count("training goes on") >= 1
    assert re.search(r"^error\[R752\]: .* cannot be written: the disk is full", rank.said, re.MULTILINE)
    assert "Traceback" not in rank.said
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3", "4", "5"]
    assert content(good.path) == before
    assert not list((tmp_path / "checkpoints").glob("*.partial"))
    (again,) = trainers.run([*command, "--max-steps", 5])
    assert "resumed at step 2" in again.said


def test_a_checkpoint_of_another_model_is_refused(trainers: Trainers, tmp_path: Path) -> None:
    command = [*TINY, "--max-steps", 1, "--output-dir", tmp_path]
    trainers.run(command)
    first, second = trainers.run([*command, "--set", "model.n_layers=2"], world=2, code=2)
    assert "error[C618]" in first.said
    assert first.said.count("\n") == 2
    assert second.said == ""


def test_a_port_that_is_taken_is_told_with_its_number(trainers: Trainers, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        (rank,) = trainers.run([*TINY, "--output-dir", tmp_path], environ=variables, code=3)
    assert f"error[R761]: port {port} (MASTER_PORT) is taken on this node" in rank.said
    assert "Traceback" not in rank.said


def test_weights_that_are_no_numbers_are_told_at_the_first_step(trainers: Trainers, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", "llama")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, file, {"format": "pt"})
    np.save(tmp_path / "data.npy", np.arange(400) % 97)
    (rank,) = trainers.run(
        [
            "--set", f"model.hf_config={folder / 'config.json'}", "--set", f"training.checkpoint.load={folder}",
            "--seq-len", 16, "--batch-size", 2, "--dataset-path", tmp_path / "data.npy", "--max-steps", 2,
            "--output-dir", tmp_path / "out",
        ],
        code=1,
    )  # fmt: skip
    assert "error[R750]: loss of step 1 is not finite on rank 0" in rank.said
