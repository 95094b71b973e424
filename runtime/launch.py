"""Starting a run on this machine: what is checked, what is started with which variables, and how the end is told."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from cost_models.errors import TitanPlanError

from .config import TrainConfig, load_config
from .device import find_devices, usable_cores
from .device_environment import child_environment, training_variables
from .device_kinds import CHOICE, KIND_OF_VENDOR
from .guard import check_layout
from .launch_command import MODULE, check_port, node_commands, torchrun_command
from .launch_failure import AGENT_LOG, Failure, find_failure
from .launch_guard import check_devices
from .launch_process import RANK_MARK, supervise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .device import Devices

FAILED, REFUSED, NOT_STARTED, INTERRUPTED = 1, 2, 3, 130
"""Exit codes: the run failed, was refused, failed before training, was interrupted."""

_NO_MODULE: Final = re.compile(r"^(?!ModuleNotFoundError)\S+: No module named ")
"""Python's own words where what `-m` names cannot be found."""

_SHUTDOWN_S: Final = 600.0
"""After a signal: the step in hand ends, and a checkpoint is written. Where a rank fails torchrun waits 30 s."""

_GRACE_S: Final = 10.0
"""Beyond what torchrun itself grants the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that was checked and can start.

    Attributes:
        config: what runs; config_path: the file that the ranks read.
        command: arguments of the one process to start.
        variables: of its environment, where the user has not set them.
        logs: folder for what torchrun and each rank say.
    """

    config: TrainConfig
    config_path: Path
    devices: Devices
    command: tuple[str, ...]
    variables: Mapping[str, str]
    logs: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnd:
    """How a run ended.

    Attributes:
        exit_code: 0 done, 1 the run failed, 2 a rank refused its input, 3 failed before training, 130 interrupted.
        error: the same in words; None where it is done.
    """

    exit_code: int
    error: TitanPlanError | None
    logs: Path
    seconds: float


def config_file(plan: Path) -> Path:
    """PLAN as users give it, a run folder or a config.yaml, to the file."""
    if not plan.is_dir():
        return plan  # a missing one is told when it is read
    if not (plan / "config.yaml").is_file():
        message = f"{plan} holds no config.yaml"
        raise TitanPlanError("C603", message, "name a config.yaml, or a run folder of a search that found a plan")
    return plan / "config.yaml"


def prepare(
    plan: Path,
    overrides: Sequence[str] = (),
    *,
    devices: Devices | None = None,
    max_restarts: int = 0,
    master_port: int | None = None,
    module: str = MODULE,
) -> Job:
    """Check a plan against the rules and this machine; nothing is started or written.

    Args:
        plan: run folder or config.yaml.
        overrides: `section.key=value`, in place of the file's.
        devices: at hand; None to look.
        master_port: where ranks meet; None for a free one.
        module: what each rank runs, with `--config FILE`.

    Raises:
        TitanPlanError: with the rule that is broken, R720 for too few devices, R723 for a port that is taken.
    """
    path = config_file(plan)
    config = load_config(path, overrides)
    devices = devices or find_devices()
    check_layout(config, kind=devices.kind)
    check_devices(config, devices)
    if master_port is not None:
        check_port(master_port)
    path = path.resolve()
    logs = Path(config.training.output_dir) / "logs" / f"{datetime.now():%m%d-%H%M%S}-{os.getpid()}"
    command = torchrun_command(
        path,
        nproc_per_node=config.world_size,
        master_port=master_port,
        max_restarts=max_restarts,
        overrides=overrides,
        module=module,
        log_dir=logs,
        shutdown_s=_SHUTDOWN_S,
    )
    return Job(
        config=config,
        config_path=path,
        devices=devices,
        command=tuple(command),
        variables=run_variables(config, devices.kind, ranks=config.world_size),
        logs=logs,
    )


def run_variables(config: TrainConfig, kind: str, *, ranks: int, one_node: bool = True) -> dict[str, str]:
    """Variables of a run's environment by default; TITAN_PLAN_DEVICE tells the ranks the kind, so that none looks."""
    found = training_variables(
        kind,
        cores=usable_cores(),
        ranks=ranks,
        comm_algorithm=config.communication.comm_algorithm,
        swaps=config.layout.swap_optimizer or config.layout.activation_offload,
        one_node=one_node,
    )
    return {CHOICE: kind, **found}


def planned_kind(config: TrainConfig) -> str:
    """The kind of device that a config's cluster has; of one that is not in the catalogue, what this machine has."""
    from cost_models.catalog import find_cluster

    with suppress(TitanPlanError):  # none named, or by the name that a file of the user's gives it
        return KIND_OF_VENDOR[find_cluster(config.cluster).device.vendor]
    here = find_devices().kind
    return "npu" if here == "cpu" else here  # nodes are named from a login node as well, which has none


def prepare_nodes(
    plan: Path,
    hosts: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    max_restarts: int = 0,
    master_port: int | None = None,
    module: str = MODULE,
) -> tuple[list[list[str]], dict[str, str]]:
    """The command of each host and the variables of all; this machine need not be one of them."""
    path = config_file(plan)
    config = load_config(path, overrides)
    kind = planned_kind(config)
    check_layout(config, kind=kind)
    commands = node_commands(
        path.resolve(),
        hosts,
        world_size=config.world_size,
        master_port=master_port,
        max_restarts=max_restarts,
        overrides=overrides,
        module=module,
        log_dir=Path(config.training.output_dir) / "logs",
    )
    ranks = config.world_size // len(hosts)
    variables = run_variables(config, kind, ranks=ranks, one_node=len(hosts) == 1)
    return commands, {"PYTHONSAFEPATH": "1", **variables}


def launch(
    job: Job, *, out: TextIO | None = None, err: TextIO | None = None, grace_s: float = _SHUTDOWN_S + _GRACE_S
) -> LaunchEnd:
    """Run it to its end; no process of it is left when this returns.

    Args:
        out, err: where rank 0's output goes; stdout and stderr of this process by default.
        grace_s: from the first signal to the kill of what still runs.
    """
    started = time.monotonic()
    try:
        job.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TitanPlanError("C603", f"cannot make {job.logs}: {error.strerror}", "set training.output_dir") from error
    ended = supervise(
        job.command,
        child_environment(job.variables, os.environ, logs_prefix=RANK_MARK),
        own_log=job.logs / AGENT_LOG,
        out=out or sys.stdout,
        err=err or sys.stderr,
        grace_s=grace_s,
    )
    told = None
    if ended.exit_code:
        told = _told(job, find_failure(job.logs, ended.exit_code), interrupted=ended.interrupted)
    seconds = time.monotonic() - started
    return LaunchEnd(exit_code=told.exit_code if told else 0, error=told, logs=job.logs, seconds=seconds)


def _resume(config: TrainConfig) -> str:
    checkpoint = config.training.checkpoint
    resumes = checkpoint.resume and checkpoint.interval
    return "the same command goes on from the newest checkpoint" if resumes else "the same command starts anew"


def _told(job: Job, failure: Failure, *, interrupted: bool) -> TitanPlanError:
    """A failure as an error: whose, its last words, where the rest is."""
    # 130 of a rank is our trainer's as well: somebody signalled the ranks and not us, as schedulers do.
    if interrupted or failure.exit_code == INTERRUPTED:
        return TitanPlanError("R710", f"interrupted; logs in {job.logs}", _resume(job.config), exit_code=INTERRUPTED)
    hint = f"{failure.hint}; " if failure.hint else ""
    hint += f"all it said is in {failure.log}"
    if not failure.started or _NO_MODULE.search(failure.text):
        return TitanPlanError("R722", f"launch failed before training: {failure.text}", hint, exit_code=NOT_STARTED)
    who = "the run" if failure.rank is None else f"rank {failure.rank}"
    # A rank's own 2 and 3 are our trainer's: bad input, or groups and devices that could not be set up.
    code = failure.exit_code if failure.exit_code in {REFUSED, NOT_STARTED} else FAILED
    return TitanPlanError("R721", f"{who} failed: {failure.text}", hint, exit_code=code)
