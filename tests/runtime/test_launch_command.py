"""The torchrun command: a list of arguments that torchrun itself reads back, and ports that are free."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys

import pytest

from cost_models.errors import TitanPlanError
from runtime.launch_command import check_port, free_port, node_commands, shell_line, split_hosts, torchrun_command


def read_back(command: list[str]) -> dict[str, object]:
    """What torchrun's own parser makes of it."""
    from torch.distributed.run import parse_args

    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    return vars(parse_args(command[3:]))


def test_one_node_meets_on_a_port_that_the_system_picks() -> None:
    read = read_back(torchrun_command("/a b/c.yaml", nproc_per_node=4))
    assert (read["nnodes"], read["nproc_per_node"], read["max_restarts"]) == ("1", "4", 0)
    assert (read["rdzv_backend"], read["rdzv_endpoint"], read["local_addr"]) == ("c10d", "localhost:0", "127.0.0.1")
    assert (read["module"], read["training_script"]) == (True, "runtime.train")
    assert read["training_script_args"] == ["--config", "/a b/c.yaml"]


def test_what_is_given_is_handed_on() -> None:
    command = torchrun_command(
        "c.yaml", nproc_per_node=2, master_port=1234, max_restarts=3, overrides=["a.b=1 2", "c=d"], module="my.train",
        log_dir="/l g",
    )  # fmt: skip
    read = read_back(command)
    assert (read["rdzv_endpoint"], read["max_restarts"], read["log_dir"]) == ("localhost:1234", 3, "/l g")
    assert read["training_script"] == "my.train"
    assert read["training_script_args"] == ["--config", "c.yaml", "--set", "a.b=1 2", "--set", "c=d"]
    assert (read["tee"], read["redirects"], read["local_ranks_filter"]) == ("3", "3", "0")


def test_a_signal_leaves_ranks_time_to_save_and_slurms_is_one() -> None:
    read = read_back(torchrun_command("c.yaml", nproc_per_node=1))
    assert read["shutdown_timeout"] == 600
    assert "SIGUSR1" in str(read["signals_to_handle"])


def test_nodes_keep_the_order_that_they_are_given_in() -> None:
    commands = node_commands("c.yaml", ["n1", "n2"], world_size=16)
    read = [read_back(command) for command in commands]
    assert [found["node_rank"] for found in read] == [0, 1]
    for found in read:
        assert (found["nnodes"], found["nproc_per_node"], found["rdzv_backend"]) == ("2", "8", "static")
        assert (found["master_addr"], found["master_port"]) == ("n1", 29500)


def test_ranks_that_do_not_split_over_the_nodes_are_refused() -> None:
    with pytest.raises(TitanPlanError) as caught:
        node_commands("c.yaml", ["a", "b", "c"], world_size=8)
    assert (caught.value.code, caught.value.message) == ("T303", "8 ranks do not split over 3 nodes")
    assert caught.value.hint.endswith("1, 2, 4, 8")


@pytest.mark.parametrize("hosts", ["", "a,,b", "a b", "a;b", "$(x)", "-x", "a,a", "a,`b`"])
def test_hosts_that_cannot_be_any_are_refused(hosts: str) -> None:
    with pytest.raises(TitanPlanError) as caught:
        split_hosts(hosts)
    assert caught.value.code == "C610"


def test_hosts_are_names_or_addresses() -> None:
    assert split_hosts("n-1.site, 10.0.0.2,fe80::1") == ["n-1.site", "10.0.0.2", "fe80::1"]


def test_a_line_for_the_shell_reads_back_to_the_same_arguments() -> None:
    command = ["python", "-m", "x", "/a b/ü'$HOME.yaml"]
    line = shell_line(command, {"A": "1 2", "B": "$x"})
    assert shlex.split(line) == ["env", "A=1 2", "B=$x", *command]
    shown = subprocess.run(["sh", "-c", shell_line(["printf", "%s", "ü'$HOME"])], capture_output=True, text=True)
    assert shown.stdout == "ü'$HOME"


def test_a_port_that_somebody_listens_on_is_named() -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        with pytest.raises(TitanPlanError) as caught:
            check_port(port)
    assert (caught.value.code, caught.value.exit_code) == ("R723", 3)
    assert caught.value.message == f"port {port} is in use"


def test_a_free_port_passes_and_a_number_that_is_none_does_not() -> None:
    check_port(free_port())
    for port in (0, -1, 65536):
        with pytest.raises(TitanPlanError, match="C610"):
            check_port(port)
