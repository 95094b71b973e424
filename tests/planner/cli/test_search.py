"""The search from the command line: the JSON that programs rely on, streams, exit codes, and the options pinned."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

from cost_models.memory import CATEGORIES
from planner.cli.errors import run
from planner.cli.root import _VERBS, cli

LAYOUT = {
    "tp": int, "sp": bool, "cp": int, "ep": int, "pp": int, "vpp": int, "dp": int, "dp_shard": int, "zero": int,
    "micro_batch": int, "accumulation": int, "schedule": str, "recompute": str, "reduce_gradients": str,
    "swap_optimizer": bool, "activation_offload": bool,
}  # fmt: skip
PLAN = {
    "id": str, "layout": dict, "step_time_s": float, "step_time_low_s": float, "step_time_high_s": float,
    "tokens_per_s_per_device": float, "mfu": float, "hfu": float, "peak_bytes": int, "headroom_bytes": int,
    "p_fits": float, "memory_bytes": dict, "time_s": dict, "worst_stage": int,
}  # fmt: skip
ANSWER = {
    "schema": int, "tool": str, "inputs": dict, "searched": dict, "plans": list, "rejected": dict, "files": dict,
    "verified": list,
}  # fmt: skip
SEARCHED = {"layouts": int, "feasible": int, "complete": bool, "evaluate_s": float}


def only_object(text: str) -> dict[str, Any]:
    """The one JSON object that a text is; constants that JSON does not have are refused."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert text.count("\n") == 1
    found = json.loads(text, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


def has_types(found: dict[str, Any], types: dict[str, type]) -> None:
    for name, type_ in types.items():
        assert type(found[name]) is type_, (name, found[name])


def searched(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> dict[str, Any]:
    code = run(["--json", "--out", str(folder), *options])
    told = capsys.readouterr()
    assert told.err == ""
    found = only_object(told.out)
    assert code == (0 if found["plans"] else 1)
    return found


CASES = [
    ("--model", "tiny", "--npus", "8"),
    ("--model", "tiny-moe", "--npus", "16", "--global-batch", "32", "--fix", "pp=2"),
    ("--model", "llama2-7b", "--npus", "8", "--global-batch", "16", "--top", "3"),
]


@pytest.mark.parametrize("options", CASES)
def test_the_json_answer_has_the_keys_and_types_that_programs_rely_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...]
) -> None:
    found = searched(capsys, tmp_path / "run", *options)
    has_types(found, ANSWER)
    has_types(found["searched"], SEARCHED)
    assert found["schema"] == 1
    assert found["tool"].startswith("titan-plan ")
    assert found["searched"]["complete"] is True
    assert found["searched"]["feasible"] + sum(found["rejected"].values()) == found["searched"]["layouts"]
    assert found["plans"]
    for plan in found["plans"]:
        has_types(plan, PLAN)
        has_types(plan["layout"], LAYOUT)
        assert set(plan["memory_bytes"]) == set(CATEGORIES)
        assert all(type(value) is int and value >= 0 for value in plan["memory_bytes"].values())
        assert all(type(value) is float and value >= 0 for value in plan["time_s"].values())
    assert {type(count) for count in found["rejected"].values()} <= {int}
    for path in found["files"].values():
        assert Path(path).exists()
    assert found["files"]["folder"] == str(tmp_path / "run")


@pytest.mark.parametrize("options", CASES)
def test_the_numbers_of_a_plan_agree_with_each_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...]
) -> None:
    found = searched(capsys, tmp_path, *options)
    inputs = found["inputs"]
    for plan in found["plans"]:
        layout = plan["layout"]
        assert sum(plan["memory_bytes"].values()) == plan["peak_bytes"]
        assert plan["peak_bytes"] + plan["headroom_bytes"] == inputs["device_memory_bytes"]
        assert plan["headroom_bytes"] >= inputs["hbm_margin_bytes"]
        assert sum(plan["time_s"].values()) == pytest.approx(plan["step_time_s"], rel=1e-9)
        tokens = inputs["seq_len"] * inputs["global_batch"]
        rate = tokens / plan["step_time_s"] / inputs["npus"]
        assert plan["tokens_per_s_per_device"] == pytest.approx(rate, rel=1e-12)
        assert layout["micro_batch"] * layout["accumulation"] * layout["dp"] == inputs["global_batch"]
        assert layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"] == inputs["npus"]
        assert plan["step_time_low_s"] < plan["step_time_s"] < plan["step_time_high_s"]
        assert 0 <= plan["p_fits"] <= 1
        assert 0 < plan["mfu"] < 1
        assert 0 <= plan["worst_stage"] < layout["pp"]


@pytest.mark.parametrize("options", CASES)
def test_plans_are_sorted_by_step_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...]
) -> None:
    plans = searched(capsys, tmp_path, *options)["plans"]
    assert len(plans) > 1
    assert all(a["step_time_s"] < b["step_time_s"] for a, b in itertools.pairwise(plans))
    assert len({plan["id"] for plan in plans}) == len(plans)


def test_report_json_is_what_json_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = searched(capsys, tmp_path, "--model", "tiny", "--npus", "4")
    assert json.loads(Path(found["files"]["report"]).read_text(encoding="utf-8")) == found


def test_mfu_is_model_flops_over_the_peak(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By hand for llama2-7b at 4096 tokens on 910B2 (353.9 TFLOPS in bf16 by its 24 cube cores at 1.8 GHz)."""
    found = searched(capsys, tmp_path, "--model", "llama2-7b", "--npus", "8", "--global-batch", "16")
    hidden, layers, ffn, vocab, seq = 4096, 32, 11008, 32000, 4096
    matmuls = layers * (4 * hidden * hidden + 3 * hidden * ffn) + vocab * hidden
    attention = layers * 2 * 2 * seq * hidden / 2
    flops_per_token = 3 * (2 * matmuls + attention)
    plan = found["plans"][0]
    peak = flops_per_token * plan["tokens_per_s_per_device"] / plan["mfu"]
    assert peak == pytest.approx(353.9e12, rel=0.01)


def test_the_default_layouts_table_goes_to_stdout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["--model", "tiny", "--npus", "8", "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    best = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))["plans"][0]
    assert best["id"] in told.out
    assert str(tmp_path / "run") in told.out
    assert "\x1b" not in told.out


def test_quiet_says_nothing_on_stderr(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["--model", "tiny", "--npus", "8", "--out", str(tmp_path), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_tokens_add_days(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = searched(capsys, tmp_path, "--model", "tiny", "--npus", "8", "--tokens", "2T")
    plan = found["plans"][0]
    seconds = 2e12 / (plan["tokens_per_s_per_device"] * 8)
    assert found["training"]["days"] == pytest.approx(seconds / 86400, rel=1e-9)


def test_top_is_how_many_plans_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert len(searched(capsys, tmp_path, "--model", "tiny", "--npus", "8", "--top", "1")["plans"]) == 1


def test_fix_and_max_bind_every_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--fix", "tp=2,zero=1", "--fix", "recompute=selective", "--max", "pp=2")
    found = searched(capsys, tmp_path, "--model", "tiny", "--npus", "8", *options)
    assert found["inputs"]["fix"] == {"tp": 2, "zero": 1, "recompute": "selective"}
    for plan in found["plans"]:
        layout = plan["layout"]
        assert (layout["tp"], layout["zero"], layout["recompute"]) == (2, 1, "selective")
        assert layout["pp"] <= 2


@pytest.mark.parametrize("batch", [1, 7, 9, 15])
def test_an_odd_batch_is_kept_as_an_exact_product(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, batch: int
) -> None:
    found = searched(capsys, tmp_path, "--model", "tiny", "--npus", "8", "--global-batch", str(batch))
    assert found["plans"]
    for plan in found["plans"]:
        layout = plan["layout"]
        assert layout["micro_batch"] * layout["accumulation"] * layout["dp"] == batch


def test_where_nothing_fits_the_exit_code_is_one_and_the_three_nearest_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--model", "70B", "--npus", "4", "--global-batch", "16")
    found = searched(capsys, tmp_path / "json", *options)
    assert found["plans"] == []
    assert found["searched"]["feasible"] == 0
    assert len(found["nearest"]) == 3
    assert all(near["lacking_bytes"] > 0 for near in found["nearest"])
    assert "config" not in found["files"]
    assert run([*options, "--out", str(tmp_path / "text")]) == 1
    told = capsys.readouterr().out
    assert "no layout fits" in told
    for near in found["nearest"]:
        assert near["lacking_bytes"] == found["inputs"]["hbm_margin_bytes"] - near["headroom_bytes"]
        (line,) = [line for line in told.splitlines() if f"{near['id']}:" in line and "lacks" in line]
        assert f"lacks {near['lacking_bytes'] / 2**30:.2f} GiB" in line
    assert "hint:" in told


def test_a_larger_margin_never_fits_more(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    feasible = [
        searched(capsys, tmp_path, "--model", "llama2-7b", "--npus", "8", "--hbm-margin", margin)["searched"][
            "feasible"
        ]
        for margin in ("0", "5%", "20GiB", "60GiB")
    ]
    assert feasible == sorted(feasible, reverse=True)
    assert feasible[0] > feasible[-1] == 0


def test_the_surface_is_pinned() -> None:
    """Options may be added; one that goes, or changes its name, breaks somebody's script."""
    assert options_of(cli) == {
        "--model", "--npus", "--cluster", "--seq-len", "--global-batch", "--precision", "--optimizer", "--tokens",
        "--comm-algorithm", "--fix", "--max", "--hbm-margin", "--calibration", "--top", "--out", "--json", "-q",
        "--quiet", "--color", "--version", "--launch", "--verify",
    }  # fmt: skip
    verbs = {name: getattr(import_module(module), attribute) for name, (module, attribute, _) in _VERBS.items()}
    assert {name: options_of(verb) for name, verb in verbs.items()} == {
        "evaluate": {
            "runs",
            "-o",
            "--out",
            "--calibration",
            "--json",
            "-q",
            "--quiet",
            "--model",
            "--cluster",
            "--seq-len",
            "--global-batch",
            "--npus",
            "--precision",
            "--stack",
        },
        "dry-run": {"plan", "--rank", "--all-stages", "--trace", "--json", "-q", "--quiet"},
        "launch": {
            "plan", "--local", "--nodes", "--dry-run", "--set", "--max-restarts", "--master-port", "--module", "--json",
            "-q", "--quiet",
        },
        "models": {"--json"},
        "clusters": {"--json"},
        "explain": {"code", "--json"},
    }  # fmt: skip
    assert {name: options_of(verb) for name, verb in verbs["clusters"].commands.items()} == {"show": {"name", "--json"}}


def options_of(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


@pytest.mark.parametrize("verb", [[], *([name] for name in _VERBS), ["clusters", "show"]])
def test_every_verb_has_help_that_names_its_options(capsys: pytest.CaptureFixture[str], verb: list[str]) -> None:
    command = cli
    for name in verb:
        command = command.get_command(click.Context(command), name)  # type: ignore[assignment]
    assert run([*verb, "--help"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    for option in options_of(command):
        assert option in told.out or option.upper() in told.out


def test_version_tells_program_schema_and_python(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("titan-plan ")
    assert "schema 1" in told


def test_help_lists_the_verbs_with_the_lines_of_their_own_help() -> None:
    for module, attribute, line in _VERBS.values():
        assert (
            getattr(import_module(module), attribute).get_short_help_str(200).startswith(line.split(",")[0].rstrip("."))
        )


def process(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", "from planner.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=60,
    )


def test_a_real_run_prints_one_object_and_writes_its_default_folder(tmp_path: Path) -> None:
    done = process("--model", "tiny", "--npus", "8", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = only_object(done.stdout)
    folder = tmp_path / found["files"]["folder"]
    assert folder.parent == tmp_path / "titan_runs"
    names = ["config.yaml", "launch.sh", "plans.csv", "rejected.csv", "report.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert math.isfinite(found["plans"][0]["step_time_s"])


def test_a_real_error_is_one_line_a_hint_and_no_traceback(tmp_path: Path) -> None:
    done = process("--model", "tiny", "--npus", "63", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0].startswith("error[T303]: 63 devices are not whole nodes")
    assert done.stderr.splitlines()[1] == "hint: use 56 or 64"
    assert len(done.stderr.splitlines()) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'from planner.cli import main; main()' models --json | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    assert done.returncode == 0


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom planner.cli.errors import run\n"
        "code = run(['--help'])\n"
        "heavy = {'numpy', 'pandas', 'torch', 'networkx', 'optuna', 'plotly', 'pydantic', 'rich'} & set(sys.modules)\n"
        "print(code, sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.strip() == "0 []"
    assert "titan-plan" in done.stdout
