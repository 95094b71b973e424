"""The content of config.yaml to a TrainConfig."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cost_models.errors import TitanPlanError
from cost_models.layout import Layout
from cost_models.workload import Workload

from .config_checks import Batch, Devices, batch_sizes, data_parallel_size
from .config_model import read_model
from .config_overrides import with_overrides
from .config_sections import (
    SECTIONS,
    ClusterSection,
    DistributedSection,
    OptimizationSection,
    PlanSection,
    TrainingSection,
    fields_of,
    read_section,
)
from .config_stages import short_stages
from .config_values import (
    CheckpointOptions,
    CommunicationOptions,
    DatasetOptions,
    NumericsOptions,
    Overrides,
    PlanSummary,
    TrainConfig,
    TrainingOptions,
)

SECTION_NAMES: Final = ("model", *SECTIONS)
_DEFAULT_MAX_STEPS: Final = 1000
_DEFAULT_CP_KIND: Final = "allgather"
"""Of the three it is the one that runs on every device and with any number of heads."""


def read_config(values: Mapping[str, object], origin: str, overrides: Overrides, world_size: int | None) -> TrainConfig:
    """Check every section, then what they say together."""
    content = with_overrides(values, overrides)
    _check_sections(content, origin)
    training = read_section(TrainingSection, content.get("training"), "training", origin)
    distributed = read_section(DistributedSection, content.get("distributed"), "distributed", origin)
    optimization = read_section(OptimizationSection, content.get("optimization"), "optimization", origin)
    cluster = read_section(ClusterSection, content.get("cluster"), "cluster", origin)
    model, changes = read_model(content.get("model"), origin, Path(origin).parent)
    if distributed.dp_size is not None:
        # What the file contradicts in itself goes before how many processes were started.
        batch_sizes(training, distributed.dp_size, origin)
    dp = data_parallel_size(distributed, training, _devices(cluster, world_size, origin), origin)
    batch = batch_sizes(training, dp, origin)
    return TrainConfig(
        model=model,
        workload=_workload(training, optimization, batch, model.seq_len),
        layout=_layout(distributed, optimization, batch, dp, _short(distributed, model.n_layers, origin)),
        training=_training(training),
        communication=CommunicationOptions(
            fuse_gradient=distributed.fuse_gradient,
            async_allreduce=distributed.async_allreduce,
            comm_algorithm=distributed.comm_algorithm,
        ),
        numerics=NumericsOptions(
            gradient_clip=optimization.gradient_clip,
            loss_scale=optimization.loss_scale,
            compile=optimization.compile,
        ),
        cluster=cluster.name,
        plan=_plan(content.get("plan"), origin),
        overrides=changes,
        origin=origin,
    )


def _check_sections(content: Mapping[str, object], origin: str) -> None:
    for name in content:
        if name in SECTION_NAMES:
            continue
        homes = [home for home, section in SECTIONS.items() if name in section.model_fields and home != "plan"]
        near = difflib.get_close_matches(name, SECTION_NAMES, 1, 0.5)
        hint = f"known sections: {', '.join(SECTION_NAMES)}"
        hint = f"did you mean {near[0]}?" if near else hint
        hint = f"{name} belongs to section {' or '.join(homes)}" if homes else hint
        raise TitanPlanError("C605", f"{origin}: unknown section {name}", hint)


def _devices(cluster: ClusterSection, world_size: int | None, origin: str) -> Devices:
    """The processes that really run go before the number that the file was written for."""
    if world_size is None:
        return Devices(cluster.devices or 0, "the cluster section names")
    if world_size < 1:
        raise TitanPlanError("T301", f"{origin}: a run with {world_size} processes", "at least 1 is needed")
    return Devices(world_size, "the run has")


def _workload(training: TrainingSection, optimization: OptimizationSection, batch: Batch, seq_len: int) -> Workload:
    return Workload(
        seq_len=training.seq_len or seq_len,
        global_batch=batch.global_batch,
        precision=optimization.precision,
        optimizer=training.optimizer,
        fused_attention=optimization.fused_attention,
        dropout=training.dropout,
        causal=training.causal,
    )


def _layout(
    distributed: DistributedSection, optimization: OptimizationSection, batch: Batch, dp: int, short: tuple[int, int]
) -> Layout:
    recompute, recompute_layers = optimization.gradient_checkpointing
    sp, shards = distributed.sequence_parallel, distributed.dp_shard_size
    return Layout(
        tp=distributed.tp_size,
        sp=distributed.tp_size > 1 if sp is None else sp,
        cp=distributed.cp_size,
        cp_kind=distributed.cp_kind or (_DEFAULT_CP_KIND if distributed.cp_size > 1 else "none"),
        ep=distributed.ep_size,
        pp=distributed.pp_size,
        vpp=distributed.virtual_pp_size,
        dp=dp,
        dp_shard=shards or (dp if optimization.zero_stage else 1),
        zero=optimization.zero_stage,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        schedule=distributed.pp_schedule or _default_schedule(distributed),
        recompute=recompute,
        recompute_layers=recompute_layers,
        reduce_gradients=distributed.reduce_gradients,
        swap_optimizer=optimization.swap_optimizer,
        activation_offload=optimization.activation_cpu_offload,
        placement=distributed.placement,
        short_first=short[0],
        short_last=short[1],
    )


def _default_schedule(distributed: DistributedSection) -> str:
    if distributed.pp_size == 1:
        return "none"
    return "interleaved" if distributed.virtual_pp_size > 1 else "1f1b"


def _short(distributed: DistributedSection, n_layers: int, origin: str) -> tuple[int, int]:
    if distributed.stage_layers is None:
        return 0, 0
    return short_stages(distributed.stage_layers, distributed.pp_size * distributed.virtual_pp_size, n_layers, origin)


def _training(training: TrainingSection) -> TrainingOptions:
    ends = training.max_steps is not None or training.epochs is not None
    return TrainingOptions(
        lr=training.lr,
        warmup_steps=training.warmup_steps,
        max_steps=training.max_steps if ends else _DEFAULT_MAX_STEPS,
        epochs=training.epochs,
        seed=training.seed,
        dataset=DatasetOptions(**fields_of(training.dataset)),
        output_dir=training.output_dir,
        checkpoint=CheckpointOptions(**fields_of(training.checkpoint)),
    )


def _plan(values: object, origin: str) -> PlanSummary | None:
    if values is None:
        return None
    return PlanSummary(**fields_of(read_section(PlanSection, values, "plan", origin)))
