"""The torchrun command of each node, as a list of arguments, and the ports that it needs."""

from __future__ import annotations

import errno
import os
import re
import shlex
import socket
import sys
from typing import TYPE_CHECKING, Final

from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MODULE: Final = "runtime.train"
DEFAULT_PORT: Final = 29500
"""Of node 0 where nodes have to agree on one: torchrun's own default."""

_MOST_PORT: Final = 65535
_HOST: Final = re.compile(r"[A-Za-z0-9._:\-\[\]]+")


def torchrun_command(
    config_path: Path | str,
    *,
    nproc_per_node: int,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
    max_restarts: int = 0,
    overrides: Sequence[str] = (),
    module: str = MODULE,
    log_dir: Path | str | None = None,
    run_id: str = "titan",
    shutdown_s: float = 600.0,
) -> list[str]:
    """What one node runs; never a shell string.

    One node meets in a store on a port that the system picks, or on `master_port`. Several nodes use torchrun's static
    rendezvous: their order is then the one given, and with it who is whose neighbour; with c10d the first to come would
    be rank 0.

    Args:
        nproc_per_node: ranks of a node.
        master_addr, master_port: node 0 and a free port there; every node is told the same.
        overrides: `section.key=value`, handed on to the trainer as `--set`.
        module: run by each rank, with `--config FILE`.
        log_dir: folder for what each rank says; None leaves it on the terminal.
        run_id: begins the name of the folder of this run in `log_dir`.
        shutdown_s: how long ranks may take to save and end after a signal.
    """
    meet = (
        _static(nnodes, node_rank, master_addr, master_port or DEFAULT_PORT) if nnodes > 1 else _local(master_port or 0)
    )
    # Every rank to its own files; of them rank 0 of the node to the terminal.
    logs = (f"--log-dir={log_dir}", "--redirects=3", "--tee=3", "--local-ranks-filter=0") if log_dir else ()
    sets = [part for item in overrides for part in ("--set", item)]
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *meet,
        f"--nproc-per-node={nproc_per_node}",
        f"--rdzv-id={run_id}",
        f"--max-restarts={max_restarts}",
        f"--shutdown-timeout={shutdown_s:.0f}",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",  # the last is Slurm's: without it torchrun dies
        *logs,
        *("-m", module, "--config", str(config_path), *sets),
    ]


def _local(port: int) -> tuple[str, ...]:
    # The address of this machine by its name, torchrun's default, is in containers often one that nobody answers.
    return ("--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--local-addr=127.0.0.1")


def _static(nnodes: int, node_rank: int, address: str, port: int) -> tuple[str, ...]:
    return (
        f"--nnodes={nnodes}",
        f"--node-rank={node_rank}",
        "--rdzv-backend=static",
        f"--master-addr={address}",
        f"--master-port={port}",
    )


def node_commands(
    config_path: Path | str,
    hosts: Sequence[str],
    *,
    world_size: int,
    master_port: int | None = None,
    max_restarts: int = 0,
    overrides: Sequence[str] = (),
    module: str = MODULE,
    log_dir: Path | str | None = None,
) -> list[list[str]]:
    """The command of each host in turn; the first is where they meet.

    Raises:
        TitanPlanError: T303 where the ranks do not split over the hosts, C610 for a host that cannot be one.
    """
    if world_size % len(hosts):
        fitting = [str(n) for n in range(1, min(world_size, 4096) + 1) if world_size % n == 0]
        message = f"{world_size} ranks do not split over {len(hosts)} nodes"
        raise TitanPlanError("T303", message, f"the number of nodes has to be one of {', '.join(fitting)}")
    return [
        torchrun_command(
            config_path,
            nproc_per_node=world_size // len(hosts),
            nnodes=len(hosts),
            node_rank=rank,
            master_addr=hosts[0],
            master_port=master_port,
            max_restarts=max_restarts,
            overrides=overrides,
            module=module,
            log_dir=log_dir,
        )
        for rank in range(len(hosts))
    ]


def split_hosts(text: str) -> list[str]:
    """HOST1,HOST2,...: each once, none empty, nothing that a shell would read otherwise."""
    hosts = [host.strip() for host in text.split(",")]
    for host in hosts:
        if not _HOST.fullmatch(host) or host.startswith("-"):
            raise TitanPlanError("C610", f"--nodes: {host[:60]!r} is no host", "give names or addresses: n1,n2,n3")
        if hosts.count(host) > 1:
            raise TitanPlanError("C610", f"--nodes names {host} twice", "each node once")
    return hosts


def shell_line(command: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """A command as one would type it, variables in front; for reading, never run from here."""
    assignments = [f"{name}={value}" for name, value in (variables or {}).items()]
    return shlex.join([*(["env", *assignments] if assignments else []), *command])


def free_port() -> int:
    """A port that nobody listens on now; somebody else may take it before it is used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Refuse a port of this machine that cannot be had.

    torchrun would take whoever listens there for its own store, and wait.

    Raises:
        TitanPlanError: R723 (exit code 3) where it is taken, C610 where it is no port.
    """
    if not 0 < port <= _MOST_PORT:
        raise TitanPlanError("C610", f"--master-port {port} is no port", f"1 to {_MOST_PORT}, or leave it out")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does: TIME_WAIT is no owner
        try:
            probe.bind(("", port))
        except OSError as error:
            what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror}"
            hint = "leave --master-port out, a free one is then found; or end what listens there"
            raise TitanPlanError("R723", f"port {port} {what}", hint, exit_code=3) from error
