"""Question: what a user asks of the search, with names resolved and defaults filled in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cost_models.calibration import calibration_of, load_calibration
from cost_models.catalog import find_cluster, find_model
from cost_models.collectives import algorithm_name
from cost_models.errors import TitanPlanError
from cost_models.setting import Setting
from cost_models.stack import TITAN
from cost_models.workload import Workload
from planner.bounds import Bounds, check_devices
from planner.quantities import parse_memory, parse_tokens

if TYPE_CHECKING:
    from cost_models.cluster import ClusterSpec

DEFAULT_CLUSTER = "atlas-800t-a2"
# `evaluate` reads fp8 runs as well; a plan is for our own trainer.
TRAINED_PRECISIONS = frozenset({"bf16", "fp16", "fp32"})
# Sequences of a step by default: 256, and from 2,048 devices on one for each 8 devices, about what Llama 3 405B
# trained with on 16,384 (arXiv:2407.21783, table 4: 2,048 sequences of 8,192 tokens).
_LEAST_BATCH, _DEVICES_PER_SEQUENCE = 256, 8
# Far above any machine, and low enough that products of them stay within 64 bits and divisors are found at once.
_MOST = {"--npus": 10**6, "--seq-len": 10**8, "--global-batch": 10**8}
# Left free by default beyond what is modelled: about one standard deviation of the memory model, so that a plan of the
# default search fits with a probability of five in six at the least.
DEFAULT_MARGIN = "5%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A search to run.

    Attributes:
        model_name, cluster_name: as the user gave them; files that others read name them so.
        margin_bytes: device memory that a plan must leave free.
        top: plans to show.
        tokens: tokens to train on, for days and device hours; 0 where not asked.
    """

    setting: Setting
    bounds: Bounds
    model_name: str
    cluster_name: str
    margin_bytes: int
    top: int
    tokens: float


def ask(
    *,
    model: str,
    npus: int,
    cluster: str | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    calibration: str | None = None,
    comm_algorithm: str = "auto",
    bounds: Bounds | None = None,
    hbm_margin: str = DEFAULT_MARGIN,
    tokens: str | None = None,
    top: int = 5,
) -> Question:
    """Resolve names, fill in defaults and check what the search cannot; errors say what would do."""
    for option, value in zip(_MOST, (npus, seq_len, global_batch), strict=True):
        if value and value > _MOST[option]:
            raise TitanPlanError(
                "C610", f"{option} {value} is more than this program counts to", f"at most {_MOST[option]}"
            )
    spec = find_model(model)
    where = find_cluster(cluster or DEFAULT_CLUSTER)
    where.check_devices(npus)
    check_devices(bounds or Bounds(), npus)
    workload = Workload(
        seq_len=spec.seq_len if seq_len is None else seq_len,
        global_batch=default_global_batch(npus) if global_batch is None else global_batch,
        precision=precision or where.device.default_precision,
        optimizer=optimizer,
    )
    if not TRAINED_PRECISIONS.issuperset({workload.precision}):
        raise TitanPlanError(
            "C611", f"--precision {workload.precision} is not one that the trainer runs", "bf16, fp16 or fp32"
        )
    _check_positions(spec.name, spec.positions, workload.seq_len)
    where.device.peak_flops(workload.numbers.compute)
    constants = load_calibration(Path(calibration)) if calibration else calibration_of(where.device.name)
    return Question(
        setting=Setting(
            model=spec,
            workload=workload,
            cluster=where,
            stack=TITAN,
            calibration=constants,
            n_devices=npus,
            algorithm=algorithm_name(where, comm_algorithm),
        ),
        bounds=bounds or Bounds(),
        model_name=model,
        cluster_name=cluster or DEFAULT_CLUSTER,
        margin_bytes=_margin(hbm_margin, where),
        top=top,
        tokens=parse_tokens(tokens) if tokens else 0.0,
    )


def default_global_batch(npus: int) -> int:
    """A batch that any share of the devices divides: the odd part of their number times a power of two."""
    odd = npus
    while odd % 2 == 0:
        odd //= 2
    batch = odd
    while batch < max(_LEAST_BATCH, npus / _DEVICES_PER_SEQUENCE):
        batch *= 2
    return batch


def _margin(text: str, cluster: ClusterSpec) -> int:
    usable = cluster.device.usable_memory_bytes
    margin = parse_memory("--hbm-margin", text, whole_bytes=usable)
    if margin >= usable:
        raise TitanPlanError(
            "C610",
            f"--hbm-margin {text} leaves nothing of the {usable / 2**30:.2f} GiB of {cluster.device.name}",
            "give a size such as 2GiB or a share such as 5%",
        )
    return margin


def _check_positions(name: str, positions: int, seq_len: int) -> None:
    if positions and seq_len > positions:
        raise TitanPlanError(
            "C610",
            f"--seq-len {seq_len} is more than the {positions} learned positions of {name}",
            f"at most {positions}",
        )
