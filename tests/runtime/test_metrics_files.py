"""metrics.csv and TensorBoard: what programs read, what a resumed run keeps, and that no disk ends a run."""

from __future__ import annotations

import csv
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import TitanPlanError
from runtime.metrics import StepRecord
from runtime.metrics_files import COLUMNS, CSV_NAME, PREVIOUS_NAME, MetricsWriter, csv_row, prepare_csv

HEADER = "step,loss,grad_norm,learning_rate,step_time_s,tokens_per_s_per_device,mfu,memory_gib\n"
RECORD = StepRecord(
    step=1,
    loss=2.3456789012345678,
    grad_norm=0.1 + 0.2,
    learning_rate=1e-4,
    step_time_s=1.5,
    tokens_per_s_per_device=1234.5,
    mfu=None,
    memory_gib=0.25,
)
FLOATS = st.floats(allow_nan=False)
RECORDS = st.builds(
    StepRecord,
    step=st.integers(1, 10**12),
    **dict.fromkeys(("loss", "grad_norm", "learning_rate", "step_time_s", "tokens_per_s_per_device"), FLOATS),
    mfu=st.none() | FLOATS,
    memory_gib=FLOATS,
)


def write(folder: Path, steps: range, *, resume_step: int | None = None, loss: float = 1.0) -> list[str]:
    told: list[str] = []
    with MetricsWriter(folder, resume_step=resume_step, tell=told.append) as writer:
        for step in steps:
            writer.write(replace(RECORD, step=step, loss=loss))
    return told


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / CSV_NAME).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def steps_and_losses(folder: Path) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row["loss"])) for row in rows(folder)]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show: events that a later life purged are gone."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(e.step, e.value) for e in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def test_the_columns_are_those_that_programs_rely_on(tmp_path: Path) -> None:
    assert write(tmp_path, range(1, 3)) == []
    assert (tmp_path / CSV_NAME).read_text(encoding="utf-8") == (
        HEADER
        + "1,1.0,0.30000000000000004,0.0001,1.5,1234.5,,0.25\n2,1.0,0.30000000000000004,0.0001,1.5,1234.5,,0.25\n"
    )


@given(record=RECORDS)
def test_every_number_reads_back_as_the_same_float(record: StepRecord) -> None:
    cells = next(csv.reader([csv_row(record)]))
    read = dict(zip(COLUMNS, cells, strict=True))
    assert int(read.pop("step")) == record.step
    assert {name: float(cell) if cell else None for name, cell in read.items()} == {
        field.name: getattr(record, field.name) for field in fields(record) if field.name in read
    }


def test_numbers_of_other_libraries_are_written_as_numbers() -> None:
    import numpy as np

    row = csv_row(replace(RECORD, loss=np.float64(0.1), grad_norm=np.float32(0.5), mfu=float("nan")))
    assert row == "1,0.1,0.5,0.0001,1.5,1234.5,nan,0.25\n"


def test_a_row_is_in_the_file_before_the_next_step(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        writer.write(RECORD)
        assert len(rows(tmp_path)) == 1


def test_a_resumed_run_drops_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, range(1, 9), loss=1.0)
    write(tmp_path, range(6, 11), resume_step=5, loss=2.0)
    assert steps_and_losses(tmp_path) == [(s, 1.0) for s in range(1, 6)] + [(s, 2.0) for s in range(6, 11)]
    assert scalars(tmp_path)["loss"] == steps_and_losses(tmp_path)
    assert not (tmp_path / PREVIOUS_NAME).exists()


def test_a_run_from_its_beginning_keeps_the_rows_of_another_run_aside(tmp_path: Path) -> None:
    write(tmp_path, range(1, 5), loss=1.0)
    write(tmp_path, range(1, 3), loss=2.0)
    assert steps_and_losses(tmp_path) == [(1, 2.0), (2, 2.0)]
    assert (tmp_path / PREVIOUS_NAME).read_text(encoding="utf-8").count("\n") == 5
    assert scalars(tmp_path)["loss"] == [(1, 2.0), (2, 2.0)]


@pytest.mark.parametrize("resume_step", [None, 3])
def test_a_file_that_is_not_ours_is_kept_aside(tmp_path: Path, resume_step: int | None) -> None:
    (tmp_path / CSV_NAME).write_text("epoch,loss\n1,2\n", encoding="utf-8")
    write(tmp_path, range(4, 6), resume_step=resume_step)
    assert [row["step"] for row in rows(tmp_path)] == ["4", "5"]
    assert (tmp_path / PREVIOUS_NAME).read_text(encoding="utf-8") == "epoch,loss\n1,2\n"


LINES = st.lists(
    st.one_of(RECORDS.map(csv_row), st.sampled_from(["\n", "1,2\n", "x,1,1,1,1,1,1,1\n", "2,a,1,1,1,1,1,1\n"])),
    max_size=8,
)


@given(lines=LINES, cut=st.integers(0, 60), resume_step=st.integers(0, 10**12))
def test_trimming_keeps_exactly_the_whole_rows_up_to_the_step(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cut: int, resume_step: int
) -> None:
    """However the last life ended, and twice is as good as once."""
    path = tmp_path_factory.mktemp("life") / CSV_NAME
    text = HEADER + "".join(lines)
    text = text[: max(len(text) - cut, len(HEADER))]
    path.write_text(text, encoding="utf-8")
    prepare_csv(path, resume_step)
    whole = [
        line for line in text.split("\n")[1:-1] if line.count(",") == 7 and line[0].isdigit() and ",a," not in line
    ]
    expected = [line for line in whole if int(line.split(",")[0]) <= resume_step]
    assert path.read_text(encoding="utf-8") == HEADER + "".join(f"{line}\n" for line in expected)
    before = path.stat().st_mtime_ns
    prepare_csv(path, resume_step)
    assert path.stat().st_mtime_ns == before
    assert os.listdir(path.parent) == [CSV_NAME]


def test_a_resumed_run_without_a_file_starts_one(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "er", range(6, 7), resume_step=5)
    assert [row["step"] for row in rows(tmp_path / "deep" / "er")] == ["6"]


@contextmanager
def disk_of(n_bytes: int) -> Iterator[None]:
    """No file can be longer than this; a write across it is cut in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


@pytest.mark.usefixtures("without_tensorboard")
def test_a_full_disk_is_told_once_and_leaves_whole_rows_only(tmp_path: Path) -> None:
    told: list[str] = []
    row = len(csv_row(RECORD))
    with MetricsWriter(tmp_path, resume_step=None, tell=told.append) as writer:
        told.clear()
        with disk_of(len(HEADER) + 2 * row + row // 2):
            for step in range(1, 6):
                writer.write(replace(RECORD, step=step))
        writer.write(replace(RECORD, step=6))
    assert len(told) == 1
    assert CSV_NAME in told[0]
    assert "training goes on" in told[0]
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "6"]


@pytest.mark.usefixtures("without_tensorboard")
def test_a_disk_that_is_full_from_the_start_costs_rows_and_not_the_old_file(tmp_path: Path) -> None:
    write(tmp_path, range(1, 9))
    told: list[str] = []
    with disk_of(100):
        writer = MetricsWriter(tmp_path, resume_step=5, tell=told.append)
        writer.write(replace(RECORD, step=6))
        assert len(rows(tmp_path)) == 8
    writer.write(replace(RECORD, step=7))
    writer.close()
    writer.close()
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3", "4", "5", "7"]
    assert sum(CSV_NAME in one for one in told) == 1
    assert sorted(os.listdir(tmp_path)) == [CSV_NAME]


@pytest.mark.usefixtures("without_tensorboard")
def test_without_tensorboard_the_run_goes_on_and_says_so_once(tmp_path: Path) -> None:
    told = write(tmp_path, range(1, 4))
    assert len(told) == 1
    assert "TensorBoard" in told[0]
    assert len(rows(tmp_path)) == 3


def test_a_tensorboard_that_fails_in_the_middle_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.tensorboard import SummaryWriter

    told: list[str] = []
    with MetricsWriter(tmp_path, resume_step=None, tell=told.append) as writer:
        monkeypatch.setattr(SummaryWriter, "add_scalar", _full)
        writer.write(RECORD)
        writer.write(replace(RECORD, step=2))
    assert len(told) == 1
    assert "No space left" in told[0]
    assert len(rows(tmp_path)) == 2


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_tensorboard_has_the_columns_and_what_only_some_runs_have(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        writer.write(replace(RECORD, mfu=0.5, skipped=True, loss_scale=128.0, balance_loss=0.25))
    shown = scalars(tmp_path)
    assert set(shown) == {*COLUMNS[1:], "skipped", "loss_scale", "balance_loss"}
    assert (shown["mfu"], shown["skipped"], shown["loss_scale"]) == ([(1, 0.5)], [(1, 1.0)], [(1, 128.0)])
    assert shown["loss"][0][1] == pytest.approx(RECORD.loss, rel=1e-6)


def test_a_value_that_a_run_does_not_have_makes_no_chart(tmp_path: Path) -> None:
    write(tmp_path, range(1, 2))
    assert not {"mfu", "loss_scale", "balance_loss"} & set(scalars(tmp_path))


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TitanPlanError) as caught:
        MetricsWriter(tmp_path / "file" / "output", resume_step=None)
    assert (caught.value.code, caught.value.exit_code) == ("R753", 3)
    assert str(tmp_path / "file" / "output") in caught.value.message
