"""launch.sh: a shell reads it, and runs what the plan says with the user's own variables first."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cost_models.catalog import find_cluster
from runtime.config import TrainConfig, parse_config
from runtime.launch_script import launch_script

A2 = find_cluster("atlas-800t-a2")
# Prints what it would have run instead of running it.
ECHO = '#!/bin/sh\nfor part in "$@"; do echo "[$part]"; done\necho "timeout $HCCL_CONNECT_TIMEOUT $PYTHONSAFEPATH"\n'


def config(ranks: int, **training: object) -> TrainConfig:
    values = {"model": {"name": "tiny"}, "distributed": {"dp_size": ranks}, "training": training}
    return parse_config(values, "config.yaml")


def run(folder: Path, text: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "launch.sh").write_text(text, encoding="utf-8")
    echo = folder / "echo it"
    echo.write_text(ECHO, encoding="utf-8")
    echo.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(echo), **variables}
    command = ["sh", str(folder / "launch.sh"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")


def test_one_node_needs_nothing_but_the_folder(tmp_path: Path) -> None:
    done = run(tmp_path / "a b'ü", launch_script(config(8), A2), "--set", "training.lr=1 2")
    told = done.stdout.splitlines()
    assert done.stderr == ""
    assert told[:2] == ["[-m]", "[torch.distributed.run]"]
    assert "[--nproc-per-node=8]" in told
    last = ["[-m]", "[runtime.train]", "[--config]", f"[{tmp_path}/a b'ü/config.yaml]", "[--set]", "[training.lr=1 2]"]
    assert told[-7:-1] == last
    assert told[-1] == "timeout 1800 1"


def test_each_of_several_nodes_says_who_it_is(tmp_path: Path) -> None:
    script = launch_script(config(64), A2)
    assert run(tmp_path, script).returncode != 0
    done = run(tmp_path, script, NODE_RANK="5", MASTER_ADDR="n0", HCCL_CONNECT_TIMEOUT="99")
    told = done.stdout.splitlines()
    for part in ("[--nnodes=8]", "[--node-rank=5]", "[--master-addr=n0]", "[--master-port=29500]"):
        assert part in told
    assert told[-1] == "timeout 99 1"
    assert "(NODE_RANK 0 to 7)" in script


@pytest.mark.parametrize("output", ["$(touch harm)", "a b", "`x`", "it's"])
def test_what_a_file_says_is_text_not_shell(tmp_path: Path, output: str) -> None:
    done = run(tmp_path, launch_script(config(8, output_dir=output), A2))
    assert f"[--log-dir={output}/logs]" in done.stdout.splitlines()
    assert not Path("/harm").exists()
