"""A plan scaled down to this machine: the same dimensions, schedule and memory savers, with a tiny model.

What is above 1 becomes 2. Where not all fit the ranks, dimensions go back to 1 in this order: dp, cp, tp, pp. Data
parallelism is the best known, so it goes first; a pipeline is what a rehearsal is for, so it stays longest. ZeRO needs
dp or cp, ep needs tp, cp or dp: they go with the last of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cost_models.catalog import find_model
from cost_models.errors import TitanPlanError
from cost_models.layout import Layout
from cost_models.workload import Workload

from .config import config_text, load_config
from .config_values import DatasetOptions, TrainConfig, TrainingOptions
from .device_kinds import CHOICE
from .guard import check_layout
from .launch import config_file
from .launch_guard import describe, most_ranks

if TYPE_CHECKING:
    from cost_models.model import ModelSpec

    from .device import Devices

MOST_RANKS: Final = 8
STEPS, SEQUENCE = 10, 128
DROP_ORDER: Final = ("dp", "cp", "tp", "pp")
_MOST_ACCUMULATION: Final = 4
_PRECISIONS: Final = {"fp32": "fp32"}
"""Others become bf16: it has the same two copies of weights, and a CPU computes in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledDown:
    """A config for this machine, and what it leaves out of the plan, one line each."""

    config: TrainConfig
    notes: tuple[str, ...]


def scale_down(config: TrainConfig, ranks: int, *, kind: str = "cpu", output_dir: str = "output") -> ScaledDown:
    """A rehearsal of a plan.

    Args:
        config: the plan.
        ranks: that this machine carries; 8 are used at the most.
        kind: npu, cuda or cpu.
        output_dir: of the rehearsal.
    """
    degrees, notes = _degrees(config.layout, max(1, min(MOST_RANKS, ranks)))
    layout, more = _layout(config.layout, degrees, kind)
    model = _model(config.model, layout)
    precision = _PRECISIONS.get(config.workload.precision, "bf16")
    if precision != config.workload.precision:
        notes.append(f"precision {config.workload.precision} -> {precision}")
    scaled = TrainConfig(
        model=model,
        workload=Workload(
            seq_len=SEQUENCE,
            global_batch=layout.micro_batch * layout.accumulation * layout.dp,
            precision=precision,
            optimizer=config.workload.optimizer,
            fused_attention=config.workload.fused_attention,
        ),
        layout=layout,
        training=_training(config.training, output_dir),
        communication=replace(config.communication, comm_algorithm="auto"),  # of links between nodes: here are none
        numerics=replace(config.numerics, compile=False, loss_scale=None),
        cluster="local" if kind == "cpu" else config.cluster,
        origin=f"{config.origin} scaled down",
    )
    check_layout(scaled, kind=kind)
    return ScaledDown(config=scaled, notes=(*notes, *more, *_replaced(config, scaled)))


def _degrees(layout: Layout, ranks: int) -> tuple[dict[str, int], list[str]]:
    """tp, cp, pp and dp of 1 or 2, at most `ranks` in all."""
    degrees = {name: min(2, getattr(layout, name)) for name in reversed(DROP_ORDER)}
    notes = [f"{name} {getattr(layout, name)} -> 2" for name in degrees if getattr(layout, name) > degrees[name]]
    for name in DROP_ORDER:
        if degrees["tp"] * degrees["cp"] * degrees["pp"] * degrees["dp"] <= ranks:
            break
        if degrees[name] > 1:
            degrees[name] = 1
            notes = [note for note in notes if not note.startswith(f"{name} ")]
            notes.append(f"{name} {getattr(layout, name)} dropped: {ranks} ranks do not hold all dimensions")
    return degrees, notes


def _layout(full: Layout, degrees: dict[str, int], kind: str) -> tuple[Layout, tuple[str, ...]]:
    tp, cp, pp, dp = (degrees[name] for name in ("tp", "cp", "pp", "dp"))
    dp_shard = dp if full.dp_shard > 1 else 1
    zero = full.zero if dp_shard * cp > 1 else 0
    cp_kind = full.cp_kind if cp > 1 else "none"
    cp_kind = "allgather" if cp_kind == "ring" and kind == "cpu" else cp_kind  # torch's ring has no CPU kernel
    experts_over = tp * cp * (dp_shard if zero else dp)
    vpp = min(2, full.vpp) if pp > 1 else 1
    short = _short(full, pp * vpp)
    every = full.reduce_gradients == "every" and zero > 1
    layout = Layout(
        tp=tp,
        sp=full.sp and tp > 1,
        cp=cp,
        cp_kind=cp_kind,
        ep=2 if full.ep > 1 and experts_over > 1 else 1,
        pp=pp,
        vpp=vpp,
        dp=dp,
        dp_shard=dp_shard if zero else 1,
        zero=zero,
        micro_batch=min(2, full.micro_batch),
        accumulation=max(min(_MOST_ACCUMULATION, full.accumulation), pp, 2 if every else 1),
        schedule=full.schedule if pp > 1 else "none",
        recompute=full.recompute,
        recompute_layers=min(1, full.recompute_layers),
        reduce_gradients="every" if every else "last",
        swap_optimizer=full.swap_optimizer,
        activation_offload=full.activation_offload,
        placement=full.placement,
        short_first=short[0],
        short_last=short[1],
    )
    return layout, _lost(full, layout)


def _short(full: Layout, stages: int) -> tuple[int, int]:
    first, last = min(1, full.short_first), min(1, full.short_last)
    # Two stages that both lack a layer are two whole ones, and a file says it so.
    return (0, 0) if stages == 1 or (stages == 2 and first == last) else (first, last)


def _lost(full: Layout, layout: Layout) -> tuple[str, ...]:
    """What else of the layout is not rehearsed."""
    lost = {
        f"ZeRO-{full.zero} -> 0: no rank to shard over": full.zero > layout.zero,
        f"ep {full.ep} -> {layout.ep}": full.ep > layout.ep,
        f"replicas of shard groups (dp_shard {full.dp_shard} of dp {full.dp}) are not kept": (
            1 < full.dp_shard < full.dp
        ),
        f"cp kind {full.cp_kind} -> {layout.cp_kind}: no kernel on a CPU": (
            layout.cp > 1 and full.cp_kind != layout.cp_kind
        ),
        f"virtual stages {full.vpp} -> {layout.vpp}": full.vpp > layout.vpp,
        f"schedule {full.schedule} -> none: no pipeline": full.schedule != layout.schedule,
        f"recomputed layers {full.recompute_layers} -> 1": full.recompute_layers > 1,
        "reduce_gradients every -> last: needs ZeRO-2": full.reduce_gradients != layout.reduce_gradients,
        f"micro batch {full.micro_batch} -> {layout.micro_batch}": full.micro_batch > layout.micro_batch,
        f"accumulation {full.accumulation} -> {layout.accumulation}": full.accumulation != layout.accumulation,
    }
    return tuple(text for text, true in lost.items() if true)


def _model(full: ModelSpec, layout: Layout) -> ModelSpec:
    """tiny or tiny-moe, with two layers in each whole virtual stage so that one of them can be recomputed."""
    tiny = find_model("tiny-moe" if full.moe else "tiny")
    stages = layout.pp * layout.vpp
    each = max(2, -(-tiny.n_layers // stages))
    return replace(tiny, n_layers=each * stages - layout.short_first - layout.short_last)


def _training(full: TrainingOptions, output_dir: str) -> TrainingOptions:
    # No checkpoint: a rehearsal starts anew each time, and one that resumed at its last step would do nothing.
    checkpoint = replace(full.checkpoint, interval=0, resume=False)
    return replace(
        full,
        warmup_steps=min(full.warmup_steps, STEPS // 2),
        max_steps=STEPS,
        epochs=None,
        dataset=DatasetOptions(name="demo"),
        output_dir=output_dir,
        checkpoint=checkpoint,
    )


def _replaced(full: TrainConfig, scaled: TrainConfig) -> tuple[str, ...]:
    notes = [
        f"model {full.model.name} -> {scaled.model.name} with {scaled.model.n_layers} layers, "
        f"sequence {full.workload.seq_len} -> {SEQUENCE}, {STEPS} steps of the demo data, no checkpoints"
    ]
    if full.numerics.compile:
        notes.append("compile is off")
    return tuple(notes)


def write_scaled_down(plan: Path, devices: Devices) -> tuple[Path, ScaledDown]:
    """Scale a plan down to this machine and write its config.yaml beside it, in `local/`.

    Raises:
        TitanPlanError: C603 where it cannot be written; what the plan itself breaks.
    """
    source = config_file(plan)
    if not most_ranks(devices):
        message = f"no rank can run here: this machine has {describe(devices)}"
        raise TitanPlanError("R720", message, f"{CHOICE}=cpu rehearses on the CPU")
    config = load_config(source)
    check_layout(config, kind="npu")  # the plan as such: what a CPU cannot do is replaced below
    folder = source.resolve().parent / "local"
    scaled = scale_down(config, most_ranks(devices), kind=devices.kind, output_dir=str(folder / "output"))
    target = folder / "config.yaml"
    try:
        folder.mkdir(exist_ok=True)
        staged = folder / f".config.{os.getpid()}.yaml"
        staged.write_text(config_text(scaled.config), encoding="utf-8")
        staged.replace(target)
    except OSError as error:
        raise TitanPlanError("C603", f"cannot write {target}: {error.strerror}", "copy the plan elsewhere") from error
    return target, scaled
