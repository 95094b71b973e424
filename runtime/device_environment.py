"""Variables of a training process: what each kind of device needs, and why; what the user has set stays."""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from .device_kinds import CHOICE

if TYPE_CHECKING:
    from collections.abc import Mapping

_OURS: Final = ("runtime", "cost_models")


class Variable(NamedTuple):
    """A default of the environment, and why it is not the library's own."""

    name: str
    value: str
    reason: str


NPU_DEFAULTS: Final = (
    Variable("HCCL_CONNECT_TIMEOUT", "1800", "ranks start minutes apart; HCCL gives up at 120 s"),
    Variable("HCCL_EXEC_TIMEOUT", "3600", "all wait while one compiles or saves; HCCL gives up at 1836 s"),
    Variable("HCCL_IF_BASE_PORT", "25809", "first of 32 host ports; HCCL's 60000 is among the client ports of Linux"),
    Variable("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "blocks that grow fragment less"),
    Variable("TASK_QUEUE_ENABLE", "2", "issues operators from two host threads; small kernels wait less"),
    Variable("CPU_AFFINITY_CONF", "1", "binds the host threads of a device to the cores beside it"),
)
"""For NPUs: by the CANN and torch_npu guides, with values that are usual in MindSpeed-LLM's training scripts."""

CUDA_DEFAULTS: Final = (
    Variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "blocks that grow fragment less"),
)


def training_variables(
    kind: str, *, cores: int, ranks: int, comm_algorithm: str = "auto", swaps: bool = False, one_node: bool = True
) -> dict[str, str]:
    """Defaults of a rank's environment, the user's own not looked at.

    Args:
        kind: npu, cuda or cpu.
        cores: that the ranks of this node share.
        ranks: of this node.
        comm_algorithm: algorithm between nodes, as the library spells it, or auto.
        swaps: optimizer state or activations go to the host: threads are then bound when they start to work.
        one_node: all ranks are on this machine.
    """
    # Ours import torch_npu where they use it; loaded by torch itself, a broken one would break `import torch`.
    found = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if kind == "npu":
        found |= {variable.name: variable.value for variable in NPU_DEFAULTS}
        if swaps:  # MindSpeed's swap guide: copies are bound to the NUMA node of their device from the start
            found["CPU_AFFINITY_CONF"] = "1,lazy_bind:0"
        if comm_algorithm != "auto":
            found["HCCL_ALGO"] = f"level0:NA;level1:{comm_algorithm}"  # level0, inside a node, is not for the user
    elif kind == "cuda":
        found |= {variable.name: variable.value for variable in CUDA_DEFAULTS}
        if comm_algorithm != "auto":
            found["NCCL_ALGO"] = comm_algorithm
    else:
        # By default every rank would start a thread for each core, and ranks would fight for them.
        found["OMP_NUM_THREADS"] = str(max(1, cores // max(1, ranks)))
        if one_node and sys.platform == "linux":
            # gloo looks up the machine's name, which in a container often has no address.
            found["GLOO_SOCKET_IFNAME"] = "lo"
    return found


def child_environment(
    variables: Mapping[str, str], base: Mapping[str, str], *, logs_prefix: str = ""
) -> dict[str, str]:
    """The environment of a launch: what the user has set, our defaults where nothing is, and safe imports.

    Args:
        variables: of `training_variables`.
        base: the user's environment; what it sets stays.
        logs_prefix: what torchrun puts before each line of a rank.
    """
    # PET_* are torchrun's options by environment, as Kubernetes operators set them; the command says all that counts.
    own = {name: value for name, value in base.items() if not name.startswith("PET_")}
    found = {**variables, **safe_environment(own)}
    if CHOICE in variables:
        found[CHOICE] = variables[CHOICE]  # an empty one of the user's is no wish, and would leave each rank to look
    # Lines come when they are written, not when a block is full.
    found.setdefault("PYTHONUNBUFFERED", "1")
    if logs_prefix:
        found["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = logs_prefix
    return found


def safe_environment(base: Mapping[str, str]) -> dict[str, str]:
    """A copy in which `-m runtime.train` is ours, whatever lies in the working folder.

    PYTHONSAFEPATH keeps the working folder off the path of `-m`. An empty part of PYTHONPATH means the working folder
    as well, and `export PYTHONPATH=$PYTHONPATH:/x` leaves one wherever it was unset, so empty parts go.
    """
    found = {**base, "PYTHONSAFEPATH": "1"}
    parts = [part for part in base.get("PYTHONPATH", "").split(os.pathsep) if part]
    root = str(Path(__file__).resolve().parents[1])
    shadowed = any((Path(part) / name).exists() for part in parts if part != root for name in _OURS)
    # Installed, ours is found anyhow, and site-packages in front would hide the standard library's modules.
    if shadowed or root not in {*site.getsitepackages(), site.getusersitepackages()}:
        parts = [root, *(part for part in parts if part != root)]
    if parts:
        found["PYTHONPATH"] = os.pathsep.join(parts)
    else:
        found.pop("PYTHONPATH", None)
    return found
