"""models, clusters, explain and evaluate from the command line."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cost_models.catalog import find_cluster, find_model, list_clusters, list_models
from cost_models.codes import CODES
from planner.cli.errors import run

SAMPLE = Path(__file__).parents[2] / "data" / "runs.csv"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def object_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found = json.loads(told(capsys, *arguments, "--json"))
    assert found["schema"] == 1
    return found


def test_models_lists_the_catalogue_with_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    header, *lines = told(capsys, "models").splitlines()
    assert "parameters" in header
    assert {line.split()[0] for line in lines} == {entry.name for entry in list_models()}
    (line,) = [line for line in lines if line.startswith("llama2-70b ")]
    # Meta's published checkpoint: 68,976,648,192 parameters.
    assert "68,976,648,192" in line


def test_every_name_that_models_tells_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(capsys, "models")["models"]
    assert len(found) == len(list_models())
    for entry in found:
        assert find_model(entry["name"]).total_params == entry["parameters"]
        for alias in entry["aliases"]:
            assert find_model(alias).name == entry["name"]
    assert {"tiny", "tiny-moe", "llama2-70b", "llama3.1-405b"} <= {entry["name"] for entry in found}


def test_clusters_lists_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    _, *lines = told(capsys, "clusters").splitlines()
    assert [line.split()[0] for line in lines] == [cluster.name for cluster in list_clusters()]
    found = object_of(capsys, "clusters")["clusters"]
    assert [cluster["name"] for cluster in found] == [cluster.name for cluster in list_clusters()]


@pytest.mark.parametrize("name", [cluster.name for cluster in list_clusters()])
def test_clusters_show_draws_each_tier(capsys: pytest.CaptureFixture[str], name: str) -> None:
    drawn = told(capsys, "clusters", "show", name)
    for tier in find_cluster(name).tiers:
        assert tier.name in drawn
    assert object_of(capsys, "clusters", "show", name)["cluster"]["name"] == name


@pytest.mark.parametrize("code", sorted(CODES))
def test_explain_tells_rule_example_and_source(capsys: pytest.CaptureFixture[str], code: str) -> None:
    text = told(capsys, "explain", code)
    assert text.startswith(code)
    assert "example: " in text
    assert "source:  " in text
    found = object_of(capsys, "explain", code)
    assert found["code"] == code
    assert all(found[key] for key in ("title", "explanation", "example", "source", "kind"))


def test_explain_d201_tells_of_layers_and_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert "80 layers over pp 3 x vpp 2" in told(capsys, "explain", "D201")


def test_explain_takes_a_code_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "explain", "d201") == told(capsys, "explain", "D201")


def test_evaluate_predicts_every_row_beside_its_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "predicted.csv"
    found = object_of(capsys, "evaluate", str(SAMPLE), "-o", str(out))
    with SAMPLE.open(encoding="utf-8", newline="") as stream:
        given = list(csv.DictReader(stream))
    with out.open(encoding="utf-8", newline="") as stream:
        predicted = list(csv.DictReader(stream))
    assert found["rows"] == len(given) == len(predicted)
    assert found["status"] == dict(Counter(row["expected_status"] for row in given))
    assert found["files"] == {"out": str(out)}
    for before, after in zip(given, predicted, strict=True):
        assert {name: after[name] for name in before} == before
        assert after["predicted_status"] == before["expected_status"]
    assert list(predicted[0])[len(given[0]) :] == [
        "predicted_step_time_s", "predicted_step_time_low_s", "predicted_step_time_high_s",
        "predicted_tokens_per_s_per_device", "predicted_mfu", "predicted_peak_gib", "fits", "predicted_status",
        "reason",
    ]  # fmt: skip


def test_evaluate_sums_up_on_stderr_unless_quiet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "predicted.csv"
    assert run(["evaluate", str(SAMPLE), "--out", str(out)]) == 0
    loud = capsys.readouterr()
    assert loud.out == ""
    assert str(out) in loud.err
    assert run(["evaluate", str(SAMPLE), "--out", str(out), "-q"]) == 0
    quiet = capsys.readouterr()
    assert (quiet.out, quiet.err) == ("", "")


def test_evaluate_agrees_with_the_search_on_the_plan_it_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One layout, asked both ways: the search's best row given back as a run."""
    fix = "tp=2,pp=2,cp=1,schedule=1f1b,zero=0,recompute=full,swap=off,offload=off,micro_batch=1,sp=on,vpp=1"
    options = ("--model", "llama2-7b", "--npus", "32", "--global-batch", "256", "--fix", fix, "--out", str(tmp_path))
    plan = object_of(capsys, *options)["plans"][0]
    runs = tmp_path / "runs.csv"
    header = (
        "model,device,n_devices,tp,pp,dp,sp,micro_batch,global_batch,seq,recompute,zero_stage_or_distopt,other_flags"
    )
    runs.write_text(f"{header}\nllama2-7b,910B2,32,2,2,8,1,1,256,4096,full,0,titan\n", encoding="utf-8")
    object_of(capsys, "evaluate", str(runs), "-o", str(tmp_path / "out.csv"))
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert row["predicted_status"] == "ok", row["reason"]
    # The stack of a run on Ascend is MindSpeed, the search's is our own trainer: near, not equal.
    assert float(row["predicted_step_time_s"]) == pytest.approx(plan["step_time_s"], rel=0.25)
