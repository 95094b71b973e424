"""Texts that torch, gloo, HCCL and NCCL really print, and what users are told; and real broken connections."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.faults import connection_error, is_connection_error

ROOT = Path(__file__).parents[2]
ENVIRON = {
    "MASTER_ADDR": "192.168.1.1",
    "MASTER_PORT": "29500",
    "RANK": "3",
    "WORLD_SIZE": "64",
    "LOCAL_WORLD_SIZE": "16",
    "GLOO_SOCKET_IFNAME": "eth0",
}
_GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
_CRASH = "This is typically caused by a remote worker crashing. Check the logs of the remote worker. 🏖️"
# torch 2.13 with gloo, each provoked on loopback; HCCL from CANN's error table and users' logs; NCCL from users' logs.
TEXTS = {
    "R760": [
        "The client socket has timed out after 3000ms while trying to connect to (127.0.0.1, 29871).",
        "The client socket has timed out after 3000ms while trying to connect to (no-such-host.invalid, 29871).",
        "The client socket has failed to connect to any network address of (192.168.1.1, 29500). "
        "The IPv4 network addresses cannot be retrieved (gai error: -2 - Name or service not known).",
    ],
    "R761": [
        "The server socket has failed to listen on any local network address. port: 29872, useIpv6: false, code: -98, "
        "name: EADDRINUSE, message: address already in use",
        "Communication_Error_Bind_IP_Port(EI0019): Failed to enable listening for the host network adapter socket. "
        "Reason: The IP address 10.0.0.1 and port 60000 have already been bound.",
        "EJ0003: [PID: 159] Failed to bind the IP port. Reason: The IP address and port have been bound already.",
    ],
    "R762": [
        "Timed out after 4 seconds waiting for clients. 1/3 clients joined.",
        "wait timeout after 3000ms, keys: /default_pg/0//cpu//0/1",
        "EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: Remote Rank did not send "
        "the data in time. Please check the reason for the rank being stuck",
        "Communication_Error_Ranktable_Detect(EI0015): Failed to collect cluster information of the communicator based "
        "on rootInfo detection. Reason: Receiving message from the root node timed out.",
        "[4] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
        "but store->get('0') got error: Socket Timeout",
    ],
    "R763": [
        f"{_GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:44931. {_CRASH}",
        f"{_GLOO}pair.cc:537] Read error [127.0.0.1]:58007: Connection reset by peer. {_CRASH}",
        "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1800000 ms\n Original exception: \n"
        f"{_GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:4840. {_CRASH}",
        "Broken pipe",
        "EI0013: An error CQE occurred during operator execution. Local information: server 10.0.0.1, device ID 0.",
    ],
    "R764": [
        f"{_GLOO}unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
        "EI0002: [PID: 13075] 2025-06-25-10:45:23.586.187 The wait execution of the Notify register times out. Reason: "
        "The Notify register has not received the Notify record from remote rank: [unknown].",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, Timeout(ms)=6000)",
    ],
    "R765": [
        "[enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. "
        "Unable to find address for: eth77",
    ],
    "R766": [
        "Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_PORT expected, but "
        "not set",
    ],
}
CASES = [(code, text) for code, texts in TEXTS.items() for text in texts]


@pytest.mark.parametrize(("code", "text"), CASES)
def test_a_text_is_told_as_what_it_means(code: str, text: str) -> None:
    error = RuntimeError(text)
    assert is_connection_error(error)
    told = connection_error(error, ENVIRON)
    assert told.code == code
    assert told.exit_code == (1 if code in {"R763", "R764"} else 3)
    assert told.hint
    assert "\n" not in told.message + told.hint
    assert "🏖" not in told.message


def test_the_hints_come_in_the_order_of_the_guide_with_what_is_set_now() -> None:
    told = connection_error(RuntimeError(TEXTS["R760"][0]), ENVIRON)
    assert "nobody answers at 127.0.0.1:29871" in told.message
    assert "rank 3 of 64" in told.message
    words = ["MASTER_ADDR", "firewall", "MASTER_PORT", "NTP", "GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"]
    words += ["HCCL_CONNECT_TIMEOUT", "HCCL_WHITELIST_DISABLE"]
    assert [told.hint.index(word) for word in words] == sorted(told.hint.index(word) for word in words)
    assert "GLOO_SOCKET_IFNAME (now eth0), HCCL_SOCKET_IFNAME (now unset)" in told.hint
    assert "`nc -vz 192.168.1.1 29500`" in told.hint


@pytest.mark.parametrize(
    ("changes", "told_so"),
    [
        ({"MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "64"}, False),
        ({}, False),
    ],
)
def test_a_master_that_means_each_node_itself_is_told(changes: dict[str, str], told_so: bool) -> None:
    told = connection_error(RuntimeError(TEXTS["R760"][0]), {**ENVIRON, **changes})
    assert ("means each node itself" in told.hint) == told_so


def test_missing_ranks_are_counted() -> None:
    told = connection_error(RuntimeError(TEXTS["R762"][0]), ENVIRON)
    assert "only 1 of 3 ranks came to 192.168.1.1:29500" in told.message
    assert "--node_rank" in told.hint


def test_the_process_that_holds_the_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = TEXTS["R761"][0].replace("29872", str(port))
        told = connection_error(RuntimeError(text), ENVIRON)
    assert f"port {port} (MASTER_PORT) is taken on this node by process {os.getpid()} (" in told.message
    assert f"sport = :{port}" in told.hint


def test_ports_of_hccl_have_their_own_variables() -> None:
    told = connection_error(RuntimeError(TEXTS["R761"][1]), ENVIRON)
    assert "HCCL_IF_BASE_PORT" in told.hint
    assert "MASTER_PORT" not in told.message


def test_the_peer_that_went_away_is_named() -> None:
    assert "a rank on 127.0.0.1 went away" in connection_error(RuntimeError(TEXTS["R763"][0]), ENVIRON).message


def test_words_that_nobody_knows_are_passed_on() -> None:
    told = connection_error(RuntimeError("EI9999: new"), {})
    assert told.code == "R769"
    assert "EI9999: new" in told.message
    assert "(now (MASTER_ADDR is not set))" in told.hint


_OTHERS = [
    RuntimeError("shape mismatch"),
    ValueError("x"),
    OSError(28, "No space left"),
    ConnectionError("Couldn't reach the Hub: Connection refused"),  # of the data, not of the ranks
]


@pytest.mark.parametrize("error", _OTHERS)
def test_other_errors_are_not_of_the_connection(error: Exception) -> None:
    assert not is_connection_error(error)


def test_an_error_below_another_one_counts() -> None:
    error = RuntimeError("pipeline stage failed")
    error.__context__ = ConnectionResetError(104, "Connection reset by peer")
    assert is_connection_error(error)
    assert connection_error(error, ENVIRON).code == "R763"


_RANK = """
import datetime, os, sys
import torch, torch.distributed as dist
from runtime.faults import connection_error, is_connection_error
case = sys.argv[1]
try:
    alone = case in ("absent", "missing")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1 if alone else 60))
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    dist.all_reduce(torch.ones(1), group=group)
    if os.environ["RANK"] == "1" and case == "killed":
        os._exit(9)
    if os.environ["RANK"] == "1":
        sys.stdin.read()
        os._exit(0)
    for _ in range(1000):
        dist.all_reduce(torch.ones(1 << 18), group=group)
except Exception as error:
    assert is_connection_error(error), repr(error)
    told = connection_error(error, os.environ)
    print(told.code, told.message, flush=True)
os._exit(0)
"""


def start(case: str, port: int, rank: int = 0, world: int = 2, **environ: str) -> subprocess.Popen[str]:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    return subprocess.Popen(
        [sys.executable, "-c", _RANK, case],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    told = process.stdout.readline()  # not `communicate`, which would close the stdin that a peer waits on
    process.communicate(timeout=60)
    return told


def test_a_master_that_is_not_there() -> None:
    port = free_port()
    assert answer(start("absent", port, rank=1)).startswith(f"R760 rank 1 of 2: nobody answers at 127.0.0.1:{port}")


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = answer(start("taken", port))
    assert re.match(rf"R761 port {port} \(MASTER_PORT\) is taken on this node by process {os.getpid()} ", told)


def test_a_rank_that_never_comes() -> None:
    assert "R762 rank 0 of 3: only 1 of 3 ranks came" in answer(start("missing", free_port(), world=3))


def test_an_interface_that_is_not_there() -> None:
    told = answer(start("interface", free_port(), world=1, GLOO_SOCKET_IFNAME="eth77"))
    assert re.match(r"R765 .*eth77", told)


@pytest.mark.parametrize(("case", "code"), [("killed", "R763"), ("slow", "R764")])
def test_a_rank_that_stops_in_the_middle_of_training(case: str, code: str) -> None:
    port = free_port()
    stopping = start(case, port, rank=1)
    try:
        assert answer(start(case, port)).startswith(f"{code} rank 0 of 2: ")
    finally:
        stopping.communicate(timeout=60)
