"""One process that saves and resumes: exactness, what runs beside training, and what fails."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cost_models.errors import TitanPlanError
from runtime.checkpoint_files import whole_checkpoints
from runtime.checkpoint_storage import _SavePlanner
from tests.runtime.checkpoint_runs import Run, straight

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = {"name": "tiny", "n_layers": 1, "vocab_size": 33}


def sections(
    precision: str = "fp32", optimizer: str = "adamw", *, swap: bool = False, **checkpoint: object
) -> dict[str, dict[str, Any]]:
    return {
        "training": {"seq_len": 8, "optimizer": optimizer, "checkpoint": checkpoint},
        "optimization": {"precision": precision, "swap_optimizer": swap},
    }


def run_of(folder: Path, **options: Any) -> Run:  # noqa: ANN401
    return Run(MODEL, sections(**options), str(folder))


def steps_in(folder: Path) -> list[int]:
    return [found.record.step for found in whole_checkpoints(folder)]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The first tensor of a save is written once the event is set."""
    event, plain = threading.Event(), _SavePlanner.lookup_object

    def wait(self: _SavePlanner, index: Any) -> torch.Tensor:  # noqa: ANN401
        assert event.wait(60)
        return plain(self, index)

    monkeypatch.setattr(_SavePlanner, "lookup_object", wait)
    yield event
    event.set()


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(_self: object, _index: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(_SavePlanner, "lookup_object", fail)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="adamw"),
        pytest.param({"optimizer": "adam", "precision": "bf16"}, id="adam bf16"),
        pytest.param({"optimizer": "sgd"}, id="sgd"),
        pytest.param({"swap": True, "precision": "bf16"}, id="swapped bf16"),
        pytest.param({"precision": "fp16"}, id="fp16"),
        pytest.param({"asynchronous": False}, id="synchronous"),
    ],
)
def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    curve, digest = straight(MODEL, sections(**options), str(tmp_path), 2, 5)
    run = run_of(tmp_path, **options)
    assert run.resume() == 2
    assert (run.steps(5), run.digest()) == (curve, digest)


def test_training_on_in_place_does_not_reach_what_is_written(tmp_path: Path, gate: threading.Event) -> None:
    run = run_of(tmp_path)
    run.steps(2)
    before = run.digest()
    run.save(wait=False)
    run.steps(4)
    assert run.digest() != before
    assert steps_in(tmp_path) == []
    gate.set()
    run.checkpoints.finish()
    again = run_of(tmp_path)
    assert again.resume() == 2
    assert again.digest() == before


def test_a_save_waits_for_the_one_before(tmp_path: Path, gate: threading.Event) -> None:
    run = run_of(tmp_path)
    run.save(wait=False)
    run.steps(1)
    threading.Timer(0.3, gate.set).start()
    run.save(wait=False)
    assert steps_in(tmp_path)[-1] == 0
    run.checkpoints.finish()
    assert steps_in(tmp_path) == [1, 0]


def test_a_run_without_a_checkpoint_starts_at_the_beginning(tmp_path: Path) -> None:
    assert run_of(tmp_path / "none" / "yet").checkpoints.newest() is None


def test_a_checkpoint_before_the_first_step_resumes_too(tmp_path: Path) -> None:
    run_of(tmp_path).save()
    run = run_of(tmp_path)
    assert run.resume() == 0
    assert run.steps(2) == run_of(tmp_path / "other").steps(2)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    run = run_of(tmp_path, keep=2)
    for step in range(1, 5):
        run.steps(step)
        run.save()
    assert steps_in(tmp_path) == [4, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_step_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.save()
    (written,) = whole_checkpoints(tmp_path)
    run.save()
    again = run_of(tmp_path)
    again.resume()
    again.save()
    assert whole_checkpoints(tmp_path) == [written]


def test_a_torn_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_of(tmp_path)
    for step in (1, 2):
        run.steps(step)
        run.save()
    torn = tmp_path / "step-00000002" / "__0_0.distcp"
    torn.write_bytes(torn.read_bytes()[:-100])
    assert run_of(tmp_path).resume() == 1
    assert "step-00000002 is not whole and is passed over" in caplog.text


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    torch.manual_seed(7)
    run.save()
    expected = torch.rand(5)
    torch.manual_seed(99)
    run_of(tmp_path).resume()
    assert torch.equal(torch.rand(5), expected)


def test_the_loss_scale_of_fp16_goes_on(tmp_path: Path) -> None:
    run = run_of(tmp_path, precision="fp16")
    run.engine.loss_scale.scale, run.engine.loss_scale.clean_steps = 512.0, 44
    run.save()
    again = run_of(tmp_path, precision="fp16")
    again.resume()
    assert (again.engine.loss_scale.scale, again.engine.loss_scale.clean_steps) == (512.0, 44)
    other = run_of(tmp_path, precision="bf16")
    other.resume()
    assert other.engine.loss_scale.scale == 1.0


def test_progress_says_what_the_position_belongs_to(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.checkpoints.save(3, 24, wait=True, dataset_digest="abc")
    checkpoints = run_of(tmp_path).checkpoints
    found = checkpoints.newest()
    assert found is not None
    progress = checkpoints.load(found)
    assert (progress.step, progress.position, progress.dataset_digest, progress.seq_len) == (3, 24, "abc", 8)


def test_a_checkpoint_of_another_model_is_not_loaded(tmp_path: Path) -> None:
    run_of(tmp_path).save()
    other = Run(MODEL | {"ffn_dim": 64}, sections(), str(tmp_path))
    before = other.digest()
    with pytest.raises(TitanPlanError, match=r"C618.*ffn_dim"):
        other.resume()
    assert other.digest() == before


def test_a_failure_in_the_background_is_told_at_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    run.save()
    run.steps(1)
    with monkeypatch.context() as patch:
        failing(patch, ValueError("the reason"))
        run.save(wait=False)
        with pytest.raises(TitanPlanError, match=r"R755.*the reason") as caught:
            run.save(wait=False)
    assert caught.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_warns_in_the_middle_and_fails_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, asynchronous: bool
) -> None:
    run = run_of(tmp_path, asynchronous=asynchronous)
    run.save()
    with monkeypatch.context() as patch:
        failing(patch, OSError(28, "No space left on device"))
        run.steps(1)
        run.save(wait=False)
        run.steps(2)
        run.save(wait=False)
        assert "R752" in caplog.text
        assert "training goes on" in caplog.text
        with pytest.raises(TitanPlanError, match="R752"):
            run.checkpoints.finish()
    run.save(wait=False)
    run.checkpoints.finish()
    assert steps_in(tmp_path) == [2, 0]
    assert logging.ERROR in {record.levelno for record in caplog.records}


def test_a_file_that_may_not_grow_is_a_full_disk(tmp_path: Path) -> None:
    """The system's own error, through torch's writer, instead of one that a test raises."""
    run = run_of(tmp_path)
    run.save()
    run.steps(1)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(TitanPlanError, match="R752"):
            run.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
    assert run_of(tmp_path).resume() == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path / "closed")
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(TitanPlanError, match=r"R755.*Permission"):
        run.save()


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path / "way")
    (tmp_path / "way").write_text("")
    with pytest.raises(TitanPlanError, match="R755"):
        run.save()
