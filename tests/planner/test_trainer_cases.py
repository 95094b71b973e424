"""The cost model's peak memory against the trainer's own, over layouts drawn by chance."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cost_models.catalog import find_model
from cost_models.layout import Layout, Layouts
from cost_models.rules import first_violations
from planner import trainer_accuracy
from planner.dry_compare import TOLERANCE, predict_rank
from planner.trainer_accuracy import difference, fits, main
from planner.trainer_cases import SEED, TrainerCase, TrainerResult, draw_cases, read_results, run_case

if TYPE_CHECKING:
    from pathlib import Path

SHALLOW = {"llama2-7b": 8, "llama2-70b": 8, "qwen3-8b": 9, "mixtral-8x7b": 8}
FEW, MANY = 8, 304
EVERY: dict[str, Any] = {"dp": 4, "dp_shard": 4, "reduce_gradients": "every"}
OFFLOADED: dict[str, Any] = EVERY | {"schedule": "interleaved", "activation_offload": True}


def predicted(case: TrainerCase) -> int:
    return predict_rank(case.setting(), case.layout, case.rank).peak_bytes


def test_draws_are_valid_reproducible_and_of_every_kind() -> None:
    drawn = list(draw_cases(64, seed=1))
    assert drawn == list(draw_cases(64, seed=1))
    for case in drawn:
        assert np.all(first_violations(case.setting(), Layouts.of([case.layout])) < 0)
        assert case.layout.devices == case.n_devices
    for name in ("model", "n_devices", "precision"):
        assert len({getattr(case, name) for case in drawn}) > 1
    assert {case.layout.zero for case in drawn} == {0, 1, 2, 3}
    assert {"none", "gpipe", "1f1b", "zb-v"} <= {case.layout.schedule for case in drawn}


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    case = next(draw_cases(1))
    result = TrainerResult(case=case, peak_bytes=7, memory_bytes={"weights": 7}, moment="update", seconds=0.5)
    path = tmp_path / "results.jsonl"
    assert read_results(path) == []
    path.write_text(f"{result.line()}\n{result.line()}\n{result.line()[:40]}", encoding="utf-8")
    assert read_results(path) == [result, result]


@pytest.mark.parametrize(
    "line", ["", "garbage", "{}", "[1]", "null", "\ufffd", "zero peak", "no such rank", "no such tp"]
)
def test_a_line_that_is_no_result_is_named(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(draw_cases(1))
    good = TrainerResult(case=case, peak_bytes=7, memory_bytes={}, moment="update", seconds=0.5)
    changed = {
        "zero peak": replace(good, peak_bytes=0),
        "no such rank": replace(good, case=replace(case, rank=9999)),
        "no such tp": replace(good, case=replace(case, layout=replace(case.layout, tp=3))),
    }
    path = tmp_path / "results.jsonl"
    text = changed[line].line() if line in changed else line
    path.write_text(f"{good.line()}\n{text}\n", encoding="utf-8")
    assert main(["--results", str(path)]) == 2
    assert "line 2 is not a result" in capsys.readouterr().err


def test_half_a_line_is_cut_before_another_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = draw_cases(2)
    done = TrainerResult(case=first, peak_bytes=7, memory_bytes={}, moment="update", seconds=0.5)
    path = tmp_path / "results.jsonl"
    path.write_text(f"{done.line()}\n{done.line()[:40]}", encoding="utf-8")
    run = replace(done, case=second)
    monkeypatch.setattr(trainer_accuracy, "get_context", lambda _kind: OneResult(run))
    trainer_accuracy.run_missing(path, 2, 1, SEED)
    assert read_results(path) == [done, run]


class OneResult:
    """Stands in for a pool of processes."""

    def __init__(self, result: TrainerResult) -> None:
        self._result = result

    def Pool(self, *_arguments: object) -> OneResult:  # noqa: N802 - multiprocessing's name
        return self

    def __enter__(self) -> OneResult:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def imap_unordered(self, _run: object, cases: list[TrainerCase]) -> list[TrainerResult]:
        assert cases == [self._result.case]
        return [self._result]


@pytest.mark.parametrize("given", [("--jobs", "0"), ("--jobs", "-3"), ("--run", "-1"), ("--run", "many")])
def test_numbers_that_make_no_sense_are_refused(given: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--results", str(tmp_path / "results.jsonl"), *given])


def test_the_page_tells_of_each_group_and_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "results.jsonl", tmp_path / "page.md"
    right = [
        TrainerResult(case=case, peak_bytes=predicted(case), memory_bytes={}, moment="update", seconds=1.0)
        for case in draw_cases(4, seed=2, layers=SHALLOW)
    ]
    path.write_text("".join(f"{result.line()}\n" for result in right), encoding="utf-8")
    assert main(["--results", str(path), "-o", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert "over 4 layouts" in text
    assert "| all | 4 | 0.00 % | 0.00 % | 0.00 % | +0.00 % |" in text
    assert all(f"| {result.case.model} | 1 |" in text for result in right)
    wrong = replace(right[0], peak_bytes=right[0].peak_bytes * 2)
    path.write_text(f"{wrong.line()}\n", encoding="utf-8")
    assert main(["--results", str(path)]) == 1
    assert "| -50.00 % |" in capsys.readouterr().out
    assert main(["--results", str(tmp_path / "none.jsonl")]) == 2
    assert "has no results" in capsys.readouterr().err


@pytest.mark.parametrize("case", list(draw_cases(FEW, seed=5, layers=SHALLOW)), ids=lambda case: case.layout.name)
def test_the_predicted_peak_is_the_trainers(case: TrainerCase) -> None:
    """A few layers only, so that what a moment holds beside them weighs more than it does in a whole model."""
    assert abs(difference(run_case(case))) < TOLERANCE


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=8, dp_shard=8, zero=3, accumulation=2),
        Layout(dp=8, dp_shard=8, zero=3, accumulation=4, reduce_gradients="every", recompute="full"),
        Layout(dp=8, dp_shard=8, zero=2, recompute="full"),
        Layout(tp=2, sp=True, dp=4, dp_shard=4, zero=3, accumulation=2, recompute="selective"),
        Layout(cp=8, cp_kind="ulysses", micro_batch=8, zero=3, recompute="selective", activation_offload=True),
        Layout(dp=8, dp_shard=8, zero=1, micro_batch=8, recompute="selective", activation_offload=True),
        Layout(dp=8, accumulation=2, recompute="full"),
    ],
    ids=lambda layout: layout.name,
)
@pytest.mark.parametrize("model", ["qwen3-0.6b", "gpt2-1.5b"])
def test_a_table_that_embedding_and_head_share_is_there_from_one_to_the_other(model: str, layout: Layout) -> None:
    """And so is the head's gradient of it, until the embedding's joins it."""
    if find_model(model).n_heads % (layout.tp * layout.cp):
        pytest.skip("its heads do not split")
    case = TrainerCase(
        model=model,
        n_layers=8,
        n_devices=8,
        seq_len=1024,
        global_batch=layout.dp * layout.micro_batch * layout.accumulation,
        precision="bf16",
        layout=layout,
    )
    assert abs(difference(run_case(case))) < 0.03


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        # The second of two micro batches: one virtual stage is left in flight as all gradients are there.
        ("llama2-70b", Layout(pp=4, vpp=2, dp=2, dp_shard=2, zero=1, micro_batch=4, accumulation=2, schedule="zb-v")),
        # The virtual stages of a rank run their backwards one after another, and reduce each before the next.
        ("llama2-7b", Layout(pp=4, vpp=2, dp=2, dp_shard=2, zero=3, micro_batch=2, accumulation=4, schedule="zb-v")),
        # Units are reduced from the embedding to the head, in the virtual stage that each is in.
        ("qwen3-8b", Layout(pp=2, vpp=2, zero=2, accumulation=2, recompute="full", schedule="zb-v", **EVERY)),
        # The head's gradient waits for those of its virtual stage.
        ("qwen3-8b", Layout(pp=2, vpp=2, zero=3, micro_batch=8, accumulation=4, schedule="zb-v", **EVERY)),
        # Another round begins with the virtual stage that has the head, and all gradients are there.
        ("llama2-7b", Layout(pp=2, vpp=2, zero=3, accumulation=4, schedule="zb-v", **EVERY)),
        # Backwards without a forward between gather no next unit; the last stage has sent one gradient.
        ("llama2-7b", Layout(pp=2, zero=3, accumulation=4, schedule="gpipe", activation_offload=True, **EVERY)),
        # Each virtual stage sends its only micro batch on, and back.
        (
            "llama2-7b",
            Layout(pp=2, vpp=8, dp=4, dp_shard=4, zero=3, micro_batch=8, recompute="full", schedule="interleaved"),
        ),
        # Before any backward two forwards in a row leave for the host, of different micro batches.
        (
            "llama2-7b",
            Layout(pp=8, vpp=2, micro_batch=16, accumulation=8, schedule="interleaved", activation_offload=True),
        ),
        # The first loss meets them, and the buffer that the head's weights came in.
        ("qwen3-8b", Layout(pp=2, vpp=8, zero=2, micro_batch=8, accumulation=2, recompute="selective", **OFFLOADED)),
        # Experts' gradients are reduced in the place of accumulated ones.
        (
            "mixtral-8x7b",
            Layout(cp=2, cp_kind="allgather", pp=4, zero=1, accumulation=8, schedule="1f1b", activation_offload=True),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else str(value),
)
def test_a_moment_of_few_micro_batches_is_the_trainers(model: str, layout: Layout) -> None:
    case = TrainerCase(
        model=model,
        n_layers=32 if model == "llama2-70b" else 16,
        n_devices=8,
        seq_len=2048,
        global_batch=layout.dp * layout.micro_batch * layout.accumulation,
        precision="bf16",
        layout=layout,
    )
    for rank in range(0, 8, 8 // layout.pp):
        assert abs(difference(run_case(replace(case, rank=rank)))) < 0.02


@pytest.mark.heavy
def test_the_predicted_peak_of_whole_models_is_the_trainers() -> None:
    results = [run_case(case) for case in draw_cases(MANY)]
    found = np.abs([difference(result) for result in results])
    assert [result.case.layout.name for result in results if fits(result) == (True, False)] == []
    assert np.median(found) < 0.01
    assert np.percentile(found, 95) < 0.03
    assert found.max() < TOLERANCE
