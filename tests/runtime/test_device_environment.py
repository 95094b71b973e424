"""Variables of a rank: defaults by kind, the user's own first, and no import from the working folder."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

import runtime
from runtime.device_environment import (
    NPU_DEFAULTS,
    child_environment,
    safe_environment,
    training_variables,
)

ROOT = str(Path(runtime.__file__).resolve().parents[1])


def variables(kind: str, **options: object) -> dict[str, str]:
    return training_variables(kind, **{"cores": 16, "ranks": 4, **options})  # type: ignore[arg-type]


def test_npu_defaults_are_set_with_a_reason_each() -> None:
    found = variables("npu")
    for name in (
        "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_IF_BASE_PORT", "PYTORCH_NPU_ALLOC_CONF",
        "TASK_QUEUE_ENABLE", "CPU_AFFINITY_CONF",
    ):  # fmt: skip
        assert name in found
    assert all(len(variable.reason) > 20 for variable in NPU_DEFAULTS)


def test_hccls_host_ports_lie_outside_what_linux_gives_to_clients() -> None:
    first = int(variables("npu")["HCCL_IF_BASE_PORT"])
    low, high = 32768, 60999
    assert first > 1024
    assert first + 31 < low or first > high


@pytest.mark.parametrize("kind", ["npu", "cuda", "cpu"])
def test_torch_never_loads_a_backend_by_itself(kind: str) -> None:
    assert variables(kind)["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(16, 4, "4"), (2, 8, "1"), (7, 2, "3"), (1, 1, "1")])
def test_ranks_on_a_cpu_share_its_cores(cores: int, ranks: int, threads: str) -> None:
    assert variables("cpu", cores=cores, ranks=ranks)["OMP_NUM_THREADS"] == threads


def test_a_forced_algorithm_is_spelled_as_the_library_reads_it() -> None:
    assert variables("npu", comm_algorithm="NHR")["HCCL_ALGO"] == "level0:NA;level1:NHR"
    assert variables("cuda", comm_algorithm="ring")["NCCL_ALGO"] == "ring"
    assert not {"HCCL_ALGO", "NCCL_ALGO"} & {*variables("npu"), *variables("cpu", comm_algorithm="ring")}


def test_swapping_binds_threads_from_the_start() -> None:
    assert variables("npu", swaps=True)["CPU_AFFINITY_CONF"] == "1,lazy_bind:0"


def test_what_the_user_has_set_stays() -> None:
    own = {"HCCL_CONNECT_TIMEOUT": "7200", "TASK_QUEUE_ENABLE": "", "HOME": "/x", "PYTHONUNBUFFERED": "0"}
    found = child_environment(variables("npu"), own)
    assert {name: found[name] for name in own} == own
    assert found["HCCL_EXEC_TIMEOUT"] == "3600"
    assert child_environment({"TITAN_PLAN_DEVICE": "npu"}, {"TITAN_PLAN_DEVICE": ""})["TITAN_PLAN_DEVICE"] == "npu"


def test_options_of_torchrun_by_environment_do_not_get_in() -> None:
    """PET_STANDALONE of an operator would undo the rendezvous that the command names."""
    found = child_environment(variables("cpu"), {"PET_STANDALONE": "1", "PETER": "1"})
    assert "PET_STANDALONE" not in found
    assert found["PETER"] == "1"


@pytest.mark.parametrize("path", ["", ":", ":/a", "/a:", "/a::/b"])
def test_an_empty_part_of_the_path_which_means_the_working_folder_goes(path: str) -> None:
    parts = safe_environment({"PYTHONPATH": path}).get("PYTHONPATH", "").split(os.pathsep)
    assert [part for part in parts if part != ROOT] == [part for part in path.split(":") if part] or parts == [""]
    assert "" not in parts or parts == [""]


def test_a_runtime_on_the_users_path_comes_behind_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where ours is installed and would not need to be named."""
    monkeypatch.setattr(site, "getsitepackages", lambda: [ROOT])
    assert "PYTHONPATH" not in safe_environment({})
    (tmp_path / "runtime").mkdir()
    found = safe_environment({"PYTHONPATH": str(tmp_path)})["PYTHONPATH"].split(os.pathsep)
    assert found == [ROOT, str(tmp_path)]


def test_a_hostile_runtime_in_the_working_folder_is_not_imported(tmp_path: Path) -> None:
    for name in ("runtime", "cost_models"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('hostile')", encoding="utf-8")
    command = [sys.executable, "-m", "runtime.device_kinds"]
    unsafe = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert "hostile" in unsafe.stderr
    environment = safe_environment({**os.environ, "PYTHONPATH": f":{tmp_path}:"})
    safe = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (safe.returncode, safe.stderr) == (0, "")
