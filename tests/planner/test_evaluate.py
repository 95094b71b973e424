"""The evaluated table: statuses, kept texts, and laws that predictions keep."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest

from cost_models.calibration import calibration_of
from cost_models.errors import TitanPlanError
from planner.answer import answer
from planner.bounds import parse_bounds
from planner.cli.errors import run
from planner.evaluate import OUTPUT_COLUMNS, EvaluatedTable, evaluate_runs, write_evaluation
from planner.question import ask
from reports.plan_tables import plans_csv

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "tests" / "data" / "runs.csv"
MEASUREMENTS = ROOT.parent / "shared" / "measurements" / "measurements.csv"
HEADER = "model,device,n_devices,tp,pp,dp,micro_batch,global_batch,seq,recompute,inter_node_gb_per_s_per_device"
RUN = "llama2-7b,910B,32,2,2,8,1,256,4096,full,25"


def rows_of(evaluated: EvaluatedTable) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(evaluated.to_csv())))


def first_of(row: str = RUN, header: str = HEADER) -> dict[str, str]:
    return rows_of(evaluate_runs(f"{header}\n{row}\n"))[0]


def step_of(row: str) -> float:
    return float(first_of(row)["predicted_step_time_s"])


def assert_predicted(row: dict[str, str]) -> None:
    names = OUTPUT_COLUMNS[:6]
    low, step, high = (float(row[f"predicted_step_time_{part}s"]) for part in ("low_", "", "high_"))
    assert all(math.isfinite(float(row[name])) and float(row[name]) > 0 for name in names), row
    assert low < step < high
    assert float(row["predicted_mfu"]) < 1
    assert row["fits"] == ("true" if row["predicted_status"] == "ok" else "false")


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in rows_of(evaluate_runs(SAMPLE))])
def test_each_dialect_gets_its_status_and_reason(row: dict[str, str]) -> None:
    assert row["predicted_status"] == row["expected_status"], row["reason"]
    assert row["expected_reason"] in row["reason"]
    if row["predicted_status"] in {"ok", "oom"}:
        assert_predicted(row)
    else:
        assert row["reason"]
        assert [row[name] for name in OUTPUT_COLUMNS[:7]] == [""] * 7


@pytest.mark.skipif(
    not MEASUREMENTS.exists(), reason="the measurements lie beside the repository on some machines only"
)
def test_every_complete_row_of_the_measurements_is_predicted() -> None:
    evaluated = evaluate_runs(MEASUREMENTS)
    rows = rows_of(evaluated)
    assert len(rows) == len(evaluated.table.rows)
    assert sum(evaluated.counts().values()) == len(rows)
    for row in rows:
        if row["predicted_status"] in {"ok", "oom"}:
            assert_predicted(row)
        else:
            assert row["reason"]
    complete = evaluated.counts()["ok"] + evaluated.counts()["oom"]
    assert complete > 0.85 * len(rows)


def test_order_and_texts_of_the_input_are_kept() -> None:
    text = 'note,device ,tp,"odd, name"\n"a ""b""\r\nc", A100-80G,08,=1+1\n\nx,,,\n'
    out = list(csv.reader(io.StringIO(evaluate_runs(text).to_csv(), newline="")))
    assert out[0] == ["note", "device ", "tp", "odd, name", *OUTPUT_COLUMNS]
    assert out[1][:4] == ['a "b"\r\nc', " A100-80G", "08", "=1+1"]
    assert out[2][:4] == ["x", "", "", ""]
    assert len(out) == 3


def test_a_prediction_does_not_depend_on_the_rows_around_it() -> None:
    with SAMPLE.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    together = [evaluation.cells() for evaluation in evaluate_runs(SAMPLE).evaluations]
    for row, cells in zip(rows, together, strict=True):
        alone = io.StringIO()
        csv.writer(alone).writerows([header, row])
        assert evaluate_runs(alone.getvalue()).evaluations[0].cells() == cells


def test_a_faster_network_is_never_slower() -> None:
    slow, fast = step_of(RUN.replace("full,25", "full,12.5")), step_of(RUN.replace("full,25", "full,50"))
    assert fast <= step_of(RUN) <= slow
    assert fast < slow


def test_a_job_of_three_devices_stays_in_its_node() -> None:
    three = "llama2-7b,A100-80G,3,1,1,3,1,12,2048,full,"
    assert step_of(f"{three}1") == step_of(f"{three}25")


def test_fp8_runs_at_half_precision_where_the_device_has_none() -> None:
    header, row = f"{HEADER},precision,flash_attention", "llama2-7b,V100-32G,32,4,8,1,1,64,2048,full,25"
    fp8, fp16 = first_of(f"{row},fp8,1", header), first_of(f"{row},fp16,1", header)
    assert fp8["predicted_step_time_s"] == fp16["predicted_step_time_s"]


def test_recomputation_takes_time_and_saves_memory() -> None:
    full, none = first_of(), first_of(RUN.replace("full", "none"))
    assert float(full["predicted_step_time_s"]) > float(none["predicted_step_time_s"])
    assert float(full["predicted_peak_gib"]) < float(none["predicted_peak_gib"])


def test_tokens_a_second_follow_from_the_step_time() -> None:
    row = first_of()
    tokens = 256 * 4096 / (float(row["predicted_step_time_s"]) * 32)
    assert float(row["predicted_tokens_per_s_per_device"]) == pytest.approx(tokens, rel=1e-5)


def test_a_doubled_batch_takes_almost_twice_as_long() -> None:
    assert 1.8 < step_of(RUN.replace(",256,", ",512,")) / step_of(RUN) < 2.0


def test_the_memory_of_the_device_is_above_that_of_the_allocator() -> None:
    device = first_of(f"{RUN},device", f"{HEADER},memory_quantity")
    allocated = first_of(f"{RUN},allocated", f"{HEADER},memory_quantity")
    assert float(device["predicted_peak_gib"]) > float(allocated["predicted_peak_gib"])
    assert allocated["predicted_peak_gib"] == first_of()["predicted_peak_gib"]


def test_a_given_calibration_serves_every_row() -> None:
    text = f"{HEADER}\n{RUN}\n"
    with_v100 = evaluate_runs(text, calibration=calibration_of("v100-32g")).evaluations[0]
    assert with_v100.step_time_s != evaluate_runs(text).evaluations[0].step_time_s


def test_a_batch_that_is_no_exact_product_is_invalid_with_the_arithmetic() -> None:
    row = first_of(RUN.replace(",256,", ",257,"))
    assert row["predicted_status"] == "invalid"
    assert row["reason"].startswith("B501: micro batch 1 x accumulation 32 x dp 8 = 256")


@pytest.mark.parametrize("number", ["99999999", "100000000"])
@pytest.mark.parametrize("column", [5, 6, 7, 8])
def test_absurd_sizes_are_answered_with_a_status(column: int, number: str) -> None:
    cells = RUN.split(",")
    cells[column] = number
    row = first_of(",".join(cells))
    if row["predicted_status"] in {"ok", "oom"}:
        assert_predicted(row)
    else:
        assert row["reason"]


def test_columns_that_evaluate_writes_are_refused_in_the_input() -> None:
    with pytest.raises(TitanPlanError, match="predicted_mfu"):
        evaluate_runs("tp,predicted_mfu\n1,0.5\n")


def test_the_table_is_written_whole_and_never_over_its_input(tmp_path: Path) -> None:
    source, out = tmp_path / "runs.csv", tmp_path / "out.csv"
    source.write_text(f"{HEADER}\n{RUN}\n", encoding="utf-8")
    evaluated = evaluate_runs(source)
    write_evaluation(evaluated, out, source)
    assert out.read_text(encoding="utf-8") == evaluated.to_csv()
    link = tmp_path / "link.csv"
    link.symlink_to(source)
    for refused in (source, link, tmp_path, tmp_path / "missing" / "out.csv", Path("bad\0name")):
        with pytest.raises(TitanPlanError) as caught:
            write_evaluation(evaluated, refused, source)
        assert caught.value.exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.csv", "out.csv", "runs.csv"]
    assert source.read_text(encoding="utf-8") == f"{HEADER}\n{RUN}\n"


@pytest.mark.parametrize(
    ("npus", "fix", "options"),
    [
        (8, "", {}),
        (8, "pp=2,schedule=zb-v", {}),
        (24, "pp=3", {"global_batch": 24}),
        (8, "cp=2,cp_kind=ring,offload=on", {"precision": "fp16"}),
        (16, "pp=2,tp=2,zero=3,reduce_gradients=every,placement=tp-cp-pp-dp", {"cluster": "V100-32G"}),
        (8, "swap=on,recompute=layers=1", {"optimizer": "sgd"}),
        (8, "ep=4,pp=2", {"model": "tiny-moe"}),
    ],
)
def test_the_plans_of_a_search_are_predicted_alike(
    npus: int, fix: str, options: dict[str, str | int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the texts of the table: a swapped name or a lost column would show in one of the numbers."""
    asked = {"model": "tiny", "npus": npus, "global_batch": 16, "cluster": "atlas-800t-a2", **options}
    question = ask(**asked, bounds=parse_bounds((fix,) if fix else (), ()))  # type: ignore[arg-type]
    plans = list(csv.reader(io.StringIO(plans_csv(answer(question).listed, "x"))))
    extra = ("device", str(asked.get("optimizer", "")))
    source, out = tmp_path / "plans.csv", tmp_path / "out.csv"
    with source.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(
            [[*plans[0], "memory_quantity", "optimizer"], *([*row, *extra] for row in plans[1:])]
        )
    command = ["evaluate", str(source), "-o", str(out), "--stack", "titan", "--json"]
    command += ["--seq-len", str(question.setting.workload.seq_len)]
    for name in ("model", "cluster", "npus", "global_batch", "precision"):
        command += [f"--{name.replace('_', '-')}", str(asked[name])] if name in asked else []
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["compared"], found["median_error"]) == (0, None)
    assert "step_time_s" in found["ignored"]
    rows = list(csv.DictReader(io.StringIO(out.read_text(encoding="utf-8"))))
    assert len(rows) == len(plans) - 1 > 0
    for row in rows:
        assert row["predicted_status"] == "ok", row
        assert float(row["predicted_step_time_s"]) == pytest.approx(float(row["step_time_s"]), rel=1e-6), row["plan_id"]
        assert float(row["predicted_peak_gib"]) == pytest.approx(float(row["peak_memory_gib"]), rel=1e-6), row[
            "plan_id"
        ]


def evaluated_by_command(
    capsys: pytest.CaptureFixture[str], folder: Path, text: str, *options: str
) -> tuple[str, str, int]:
    source = folder / "runs.csv"
    source.write_text(text, encoding="utf-8")
    code = run(["evaluate", str(source), "-o", str(folder / "out.csv"), *options])
    told = capsys.readouterr()
    return told.out, told.err, code


def test_measured_step_times_are_compared_and_unread_columns_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = step_of(RUN)
    text = f"{HEADER},color,step_time_s\n{RUN},red,{step / 1.1}\n{RUN},blue,{step / 0.8}\n{RUN},,\nx,,,,,,,,,,,,5\n"
    _, err, _ = evaluated_by_command(capsys, tmp_path, text)
    assert "median absolute error 15.0% over 2 rows" in err
    assert err.count("note: not read: color\n") == 1
    out, err, _ = evaluated_by_command(capsys, tmp_path, text, "--json")
    found = json.loads(out)
    assert (found["compared"], found["ignored"], err) == (2, ["color"], "")
    assert found["median_error"] == pytest.approx(0.15, rel=1e-6)
    assert evaluated_by_command(capsys, tmp_path, text, "-q") == ("", "", 0)


def test_measured_tokens_are_compared_where_the_batch_is_a_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = float(first_of()["predicted_tokens_per_s_per_device"])
    text = f"model,device,tp,pp,dp,micro_batch,recompute,inter_node_gb_per_s_per_device,tokens_per_s_per_device\n\
llama2-7b,910B,2,2,8,1,full,25,{tokens}\n"
    out, _, _ = evaluated_by_command(capsys, tmp_path, text, "--seq-len", "4096", "--global-batch", "256", "--json")
    found = json.loads(out)
    assert found["compared"] == 1
    assert found["median_error"] < 1e-6


@pytest.mark.parametrize(
    "option",
    [("--model", "no-such"), ("--cluster", "abacus"), ("--stack", "jax"), ("--precision", "int3"), ("--npus", "0")],
)
def test_a_wrong_default_is_refused_once(
    option: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err, code = evaluated_by_command(capsys, tmp_path, f"{HEADER}\n{RUN}\n", *option)
    assert (out, code) == ("", 2)
    assert option[1] in err
    assert not (tmp_path / "out.csv").exists()
