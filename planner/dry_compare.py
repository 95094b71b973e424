"""What was predicted for one rank beside what its dry run found, and where the two disagree."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cost_models.layout import Layouts
from cost_models.memory import CATEGORIES, MemoryModel
from cost_models.parameters import stage_of
from cost_models.prediction import usable_bytes
from cost_models.rank_elements import gradient_elements, updated_elements
from cost_models.rank_flops import rank_flops
from cost_models.rank_grid import RankGrid
from cost_models.rank_traffic import rank_messages
from cost_models.stage_memory import StageMemory
from cost_models.stage_parts import ModelParts
from planner.answer_json import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cost_models.layout import Column, Layout
    from cost_models.rank_messages import RankMessage
    from cost_models.setting import Setting
    from runtime.dry_run.shortened import ToldRun
    from runtime.dry_run.values import DryRun, Message

TENSORS: Final = tuple(name for name in CATEGORIES if name not in {"communication", "reserve"})
"""Categories of the cost model that are tensors, which is what a dry run sees."""
TRANSIENT: Final = ("gathered", "buffers", "temporaries")
"""Categories of a dry run that the cost model has in one, `transient`."""

TOLERANCE: Final = 0.06
"""Share by which a predicted peak may differ from the dry run's."""

_FLOPS_TOLERANCE: Final = 0.001

# The dry run's attention is the CPU's, which keeps one fp32 number a token and head; a device may keep more.
_CPU_STATISTICS_BYTES: Final = 4.0
_GIB: Final = float(2**30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """All messages of one kind among the same ranks.

    Attributes:
        names: dimensions that have just these ranks, such as `dp_shard` and `world`.
        n_bytes: of all of them. All-gather: output, reduce-scatter: input, otherwise the tensor.
    """

    ranks: tuple[int, ...]
    kind: str
    names: tuple[str, ...]
    count: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """Memory, work and traffic of one rank in one step, predicted or found.

    Attributes:
        peak_bytes: of live tensors.
        memory_bytes: parts of the peak, by the names of `TENSORS`.
        parameter_bytes: what the optimizer updates; gradient_bytes: what it reads; optimizer_bytes: its moments.
        host_bytes: swapped and offloaded.
        traffic: by ranks and kind.
    """

    peak_bytes: int
    memory_bytes: Mapping[str, int]
    flops: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_bytes: int
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """What a device holds beside the tensors of a dry run, and how much it has.

    Attributes:
        known: whether cluster and constants of the config's device are at hand; otherwise nothing is said of it.
        communication_bytes: buffers of the communicators.
        context_bytes: of the runtime.
        fragmentation: reserved over allocated memory, less 1.
        statistics_bytes: softmax statistics that the device's attention kernel makes at the peak beyond the CPU's.
        usable_bytes: that torch reports for the device.
    """

    known: bool
    communication_bytes: int
    context_bytes: int
    fragmentation: float
    statistics_bytes: int
    usable_bytes: int

    def peak_bytes(self, tensor_bytes: int) -> int:
        """On the device, where the tensors of a dry run take so much."""
        tensors = tensor_bytes + self.statistics_bytes
        return round(tensors * (1.0 + self.fragmentation)) + self.context_bytes + self.communication_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DryComparison:
    """One rank, predicted and run dry.

    Attributes:
        layout: its name.
        stage: pipeline rank.
        run: the dry run with its timeline and largest tensors.
        micro_batches: of each run that was made; two where the step was told from shorter ones.
    """

    layout: str
    rank: int
    stage: int
    predicted: RankFigures
    found: RankFigures
    room: DeviceRoom
    run: DryRun
    micro_batches: tuple[int, ...]

    @property
    def difference(self) -> float:
        """Predicted over found peak, less 1."""
        return self.predicted.peak_bytes / max(self.found.peak_bytes, 1) - 1.0

    @property
    def device_peak_bytes(self) -> int:
        """What the dry run's peak takes on the device."""
        return self.room.peak_bytes(self.found.peak_bytes)

    def problems(self) -> tuple[str, ...]:
        """What is wrong with the plan or with the prediction, a sentence each."""
        told = []
        room = self.room
        if room.known and self.device_peak_bytes > room.usable_bytes:
            peak, usable = self.device_peak_bytes / _GIB, room.usable_bytes / _GIB
            told.append(f"rank {self.rank} does not fit: {peak:.2f} GiB of the {usable:.2f} GiB that the device has")
        if contradiction(self.difference):
            told.append(f"rank {self.rank}: the prediction contradicts the trainer: {contradiction(self.difference)}")
        return (*told, *(f"rank {self.rank}: {what}" for what in self._contradictions()))

    def _contradictions(self) -> Iterator[str]:
        """Work, states and messages, which are predicted exactly."""
        said, found = self.predicted, self.found
        if abs(said.flops - found.flops) > _FLOPS_TOLERANCE * found.flops:
            yield f"{said.flops:.4g} FLOPs are predicted, the trainer computes {found.flops:.4g}"
        for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            if getattr(said, name) != getattr(found, name):
                what = name.removesuffix("_bytes")
                yield f"{getattr(said, name):,} {what} bytes are predicted, the trainer has {getattr(found, name):,}"
        kinds = {key: (t.count, t.n_bytes) for t in said.traffic for key in [(t.ranks, t.kind)]}
        sent = {key: (t.count, t.n_bytes) for t in found.traffic for key in [(t.ranks, t.kind)]}
        for ranks, kind in sorted(kinds.keys() | sent.keys()):
            told, real = kinds.get((ranks, kind), (0, 0)), sent.get((ranks, kind), (0, 0))
            if told != real:
                yield (
                    f"{told[0]} x {kind} over {len(ranks)} ranks with {told[1]:,} bytes are predicted, "
                    f"the trainer sends {real[0]} with {real[1]:,}"
                )


def contradiction(difference: float) -> str:
    """What is wrong with a peak that is predicted so much above, or below, the trainer's; empty if it is near enough.

    Args:
        difference: predicted over found peak, less 1.
    """
    if abs(difference) <= TOLERANCE:
        return ""
    way = "more" if difference > 0 else "less"
    return f"{abs(difference):.1%} {way} memory is predicted than the trainer takes, {TOLERANCE:.0%} are allowed"


def compare(setting: Setting, layout: Layout, told: ToldRun, *, known: bool = True) -> DryComparison:
    """Set a dry run beside the prediction for its rank.

    Args:
        known: the setting's cluster is that of the config.
    """
    run = told.run
    predicted, found = _named_alike(predict_rank(setting, layout, run.rank), _found(run))
    return DryComparison(
        layout=layout.name,
        rank=run.rank,
        stage=RankGrid.of(layout).coordinates(run.rank).pp,
        predicted=predicted,
        found=found,
        room=room_of(setting, layout, run.rank, known=known),
        run=run,
        micro_batches=told.micro_batches,
    )


def _named_alike(*sides: RankFigures) -> tuple[RankFigures, ...]:
    """The same ranks have the names that either side has for them."""
    names: dict[tuple[int, ...], set[str]] = {}
    for side in sides:
        for traffic in side.traffic:
            names.setdefault(traffic.ranks, set()).update(traffic.names)
    return tuple(
        replace(side, traffic=tuple(replace(t, names=tuple(sorted(names[t.ranks]))) for t in side.traffic))
        for side in sides
    )


def predict_rank(setting: Setting, layout: Layout, rank: int) -> RankFigures:
    """What the cost model says of a rank under the attention kernel of a dry run."""
    setting = _with_cpu_attention(setting)
    stage, workload = _stage_memory(setting, layout, rank), setting.workload
    numbers, updated = workload.numbers, updated_elements(setting.model, layout, rank)
    in_full = numbers.main_weight_bytes or numbers.weight_bytes
    gradient = setting.stack.gradient_bytes if numbers.main_weight_bytes else numbers.weight_bytes
    categories = {name: round(_number(column)) for name, column in stage.categories().items()}
    return RankFigures(
        peak_bytes=sum(categories.values()),
        memory_bytes=categories,
        flops=rank_flops(setting, layout, rank).total,
        parameter_bytes=updated * in_full,
        gradient_bytes=gradient_elements(setting.model, layout, rank) * gradient,
        optimizer_bytes=updated * workload.optimizer_state_bytes,
        host_bytes=round(_number(stage.swapped) + _number(stage.offloaded)),
        traffic=_traffic(rank_messages(setting, layout, rank)),
    )


def _found(run: DryRun) -> RankFigures:
    memory = {name: run.memory_bytes.get(name, 0) for name in TENSORS if name != "transient"}
    memory["transient"] = sum(run.memory_bytes[name] for name in TRANSIENT)
    return RankFigures(
        peak_bytes=run.peak_bytes,
        memory_bytes={name: memory[name] for name in TENSORS},
        flops=run.flops,
        parameter_bytes=run.parameter_bytes,
        gradient_bytes=run.gradient_bytes,
        optimizer_bytes=run.optimizer_bytes,
        host_bytes=run.host_bytes,
        traffic=_traffic(run.messages),
    )


def _traffic(messages: Sequence[RankMessage | Message]) -> tuple[Traffic, ...]:
    """Groups of the same ranks are one, in any order: torch lends the world's group to a dimension that spans it."""
    found: dict[tuple[tuple[int, ...], str], list[RankMessage | Message]] = {}
    for message in messages:
        found.setdefault((tuple(sorted(message.ranks)), message.kind), []).append(message)
    return tuple(
        Traffic(
            ranks=ranks,
            kind=kind,
            names=tuple(sorted({m.group for m in same})),
            count=sum(m.count for m in same),
            n_bytes=sum(m.n_bytes for m in same),
        )
        for (ranks, kind), same in found.items()
    )


def room_of(setting: Setting, layout: Layout, rank: int, *, known: bool = True) -> DeviceRoom:
    """What the device of a rank holds beside the tensors of a dry run."""
    parts = MemoryModel(setting, Layouts.of([layout])).estimate().by_category()
    plain = _stage_memory(_with_cpu_attention(setting), layout, rank)
    more = _number(_stage_memory(setting, layout, rank).tensors) - _number(plain.tensors)
    return DeviceRoom(
        known=known,
        communication_bytes=round(_number(parts["communication"])),
        context_bytes=round(setting.cluster.device.context_bytes),
        fragmentation=setting.calibration.fragmentation,
        statistics_bytes=round(more),
        usable_bytes=usable_bytes(setting),
    )


def _with_cpu_attention(setting: Setting) -> Setting:
    return replace(setting, calibration=replace(setting.calibration, softmax_statistics_bytes=_CPU_STATISTICS_BYTES))


def _stage_memory(setting: Setting, layout: Layout, rank: int) -> StageMemory:
    layouts = Layouts.of([layout])
    stage = stage_of(setting.model, layouts, RankGrid.of(layout).coordinates(rank).pp)
    return StageMemory(setting, layouts, ModelParts(setting, layouts), stage)


def _number(column: Column) -> float:
    return float(np.asarray(column).reshape(-1)[0])


def comparison_object(compared: DryComparison) -> dict[str, Any]:
    """One rank as the JSON object that programs may rely on; additions are free."""
    run, room = compared.run, compared.room
    on_device: dict[str, Any] | None = None
    if room.known:
        peak = compared.device_peak_bytes
        on_device = {**asdict(room), "peak_bytes": peak, "fits": peak <= room.usable_bytes}
        del on_device["known"]
    return {
        "schema": SCHEMA,
        "layout": compared.layout,
        "rank": compared.rank,
        "stage": compared.stage,
        "seconds": run.seconds,
        "micro_batches": list(compared.micro_batches),
        "predicted": _figures_object(compared.predicted),
        "dry_run": {
            **_figures_object(compared.found),
            "transient_bytes": {name: run.memory_bytes[name] for name in TRANSIENT},
            "moment": run.moment,
            "largest": [asdict(tensor) for tensor in run.largest],
        },
        "difference": compared.difference,
        "on_device": on_device,
        "problems": list(compared.problems()),
    }


def _figures_object(figures: RankFigures) -> dict[str, Any]:
    return {
        "peak_bytes": figures.peak_bytes,
        "memory_bytes": dict(figures.memory_bytes),
        "flops": figures.flops,
        "parameter_bytes": figures.parameter_bytes,
        "gradient_bytes": figures.gradient_bytes,
        "optimizer_bytes": figures.optimizer_bytes,
        "host_bytes": figures.host_bytes,
        "collectives": [
            {"kind": t.kind, "group": list(t.ranks), "dimensions": list(t.names), "count": t.count, "bytes": t.n_bytes}
            for t in figures.traffic
        ],
    }
