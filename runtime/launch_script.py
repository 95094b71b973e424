"""launch.sh of a run folder: the same command for each node, for machines where titan-plan starts nothing itself."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from .device_kinds import KIND_OF_VENDOR
from .launch import run_variables
from .launch_command import DEFAULT_PORT, torchrun_command

if TYPE_CHECKING:
    from cost_models.cluster import ClusterSpec

    from .config_values import TrainConfig

_HEAD = """\
#!/bin/sh
# {layout}: {nodes} x {per_node} devices of {cluster}. {how}
# Options behind it go to the trainer: sh launch.sh --set training.max_steps=100
set -eu
folder=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)

# Keeps a runtime/ in the working folder off Python's path.
export PYTHONSAFEPATH=1
# Defaults; what is set already stays.
"""
_ONE = "Start it with: sh launch.sh"
_MANY = "Start it on each node:\n#   NODE_RANK=0 MASTER_ADDR=<host of node 0> sh launch.sh      (NODE_RANK 0 to {last})"


def launch_script(config: TrainConfig, cluster: ClusterSpec) -> str:
    """The text of launch.sh beside the config.yaml of a plan for a cluster."""
    per_node = min(cluster.devices_per_node, config.world_size)
    nodes = config.world_size // per_node
    how = _ONE if nodes == 1 else _MANY.format(last=nodes - 1)
    kind = KIND_OF_VENDOR[cluster.device.vendor]
    variables = run_variables(config, kind, ranks=per_node, one_node=nodes == 1)
    head = _HEAD.format(layout=config.layout.name, nodes=nodes, per_node=per_node, cluster=cluster.name, how=how)
    exports = "".join(f'export {name}="${{{name}:-{value}}}"\n' for name, value in sorted(variables.items()))
    return f"{head}{exports}\n{_command(config, nodes, per_node)}\n"


def _command(config: TrainConfig, nodes: int, per_node: int) -> str:
    command = torchrun_command(
        "CONFIG", nproc_per_node=per_node, nnodes=nodes, log_dir=f"{config.training.output_dir}/logs"
    )
    # What only the node knows; all else is a fixed text that the shell must not read.
    known = {
        command[0]: '"${PYTHON:-python}"',
        "CONFIG": '"$folder/config.yaml"',
        "--node-rank=0": '--node-rank="${NODE_RANK:?}"',
        "--master-addr=127.0.0.1": '--master-addr="${MASTER_ADDR:?}"',
        f"--master-port={DEFAULT_PORT}": f'--master-port="${{MASTER_PORT:-{DEFAULT_PORT}}}"',
    }
    parts = [known.get(part, shlex.quote(part)) for part in command]
    return "exec " + " \\\n    ".join([" ".join(parts[:3]), *parts[3:-4], " ".join(parts[-4:]), '"$@"'])
