"""Runs one step of the trainer without hardware, and adds up what was seen."""

from __future__ import annotations

import gc
import time
from collections import Counter
from contextlib import ExitStack
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from runtime.assembly import StandIns, assemble, open_groups
from runtime.engine import Engine
from runtime.guard import check_layout
from runtime.models.building import balanced

from .ledger import FOREVER, Held, Ledger, category_of
from .passes import Passes
from .stand_ins import CountingKernel, DryDevice
from .torch_fake import fake_tensors, fake_world, messages_held, resizes_told
from .values import CATEGORIES, DryRun, LiveTensor, Message, Moment
from .watch import Watch

if TYPE_CHECKING:
    from runtime.config_values import TrainConfig
    from runtime.parallel.groups import Groups

    from .stand_ins import CountedDevice

_LARGEST = 10
_TIMELINE_POINTS = 2000


def dry_run(config: TrainConfig, rank: int = 0) -> DryRun:
    """One step of one rank of a layout, as the trainer would run it once it runs.

    The optimizer's state is made before, by an update that only the optimizer takes.

    Args:
        rank: 0 to the layout's devices less 1.

    Raises:
        TitanPlanError: the trainer cannot run the layout.
    """
    started = time.perf_counter()
    check_layout(config)
    with ExitStack() as stack:
        if config.layout.devices > 1:
            stack.enter_context(fake_world(rank, config.layout.devices))
        ledger = Ledger()
        watch = Watch(ledger)
        groups = open_groups(config, "cpu")  # a mesh reads numbers, so it is made of real tensors
        stack.enter_context(resizes_told(ledger.resized))
        stack.enter_context(messages_held())
        stack.enter_context(fake_tensors())
        stack.enter_context(watch)
        stand_ins = StandIns(groups=groups, kernel=CountingKernel(watch), row_counts=balanced)
        return followed(config, rank, DryDevice(ledger), stand_ins, ledger, watch, started=started)


def followed(
    config: TrainConfig,
    rank: int,
    device: CountedDevice,
    stand_ins: StandIns,
    ledger: Ledger,
    watch: Watch,
    *,
    started: float,
    settled: bool = True,
) -> DryRun:
    """Build a rank and tell of one step, with what a step makes once there already. The watch is on.

    Args:
        started: `time.perf_counter()` of the beginning.
        settled: there are no other ranks, nor values: the first step need not be taken as a whole.
    """
    assembly = assemble(config, device, stand_ins)
    if assembly.pipeline is not None and settled:
        assembly.pipeline.settle_shapes()
    engine = Engine(config, assembly, device)
    watch.follow(chunk.module.build.tp.gradients for chunk in assembly.chunks)
    passes = Passes(ledger, config, assembly, engine)
    if settled:
        engine.optimizer.step(config.training.lr, lambda trainable: torch.zeros(trainable.weight.shape))
    else:
        engine.step(_batch(config), config.training.lr)
    passes.label_lasting()
    gc.collect()  # whatever the first step left in circles is not the second one's
    ledger.begin_step()
    watch.begin_step()
    engine.step(_batch(config), config.training.lr)
    passes.label_lasting()
    return _found(rank, ledger, watch, stand_ins.groups, engine, started)


def _batch(config: TrainConfig) -> torch.Tensor:
    layout = config.layout
    return torch.zeros(layout.accumulation, layout.micro_batch, config.workload.seq_len + 1, dtype=torch.int64)


def _found(rank: int, ledger: Ledger, watch: Watch, groups: Groups | None, engine: Engine, started: float) -> DryRun:
    records = [r for r in ledger.records if r.n_bytes]
    device = [r for r in records if not r.on_host]
    changes = _changes(device, ledger.events)
    levels = list(accumulate(changes))
    peak = max(levels)
    at = levels.index(peak)
    alive = [r for r in device if r.born <= at < r.died]
    sizes = Counter(dict.fromkeys(CATEGORIES, 0))
    for record in alive:
        sizes[category_of(record)] += record.n_bytes
    lasting = [r for r in records if r.died == FOREVER]
    return DryRun(
        rank=rank,
        peak_bytes=peak,
        memory_bytes=dict(sizes),
        moment=_moment(ledger, device, at),
        largest=tuple(_live(r, ledger) for r in sorted(alive, key=lambda r: -r.n_bytes)[:_LARGEST]),
        parameter_bytes=sum(t.weight.numel() * t.weight.element_size() for t in engine.trainables),
        gradient_bytes=sum(r.n_bytes for r in lasting if r.label == "gradients"),
        optimizer_bytes=sum(
            v.numel() * v.element_size() for s in engine.optimizer.state().values() for v in s.values() if v.ndim
        ),
        host_bytes=max(accumulate(_changes([r for r in records if r.on_host], ledger.events)), default=0),
        forward_flops=watch.flops[False],
        backward_flops=watch.flops[True],
        messages=_messages(watch, groups),
        timeline=_timeline(device, ledger.events),
        highs=_highs(device, ledger),
        seconds=time.perf_counter() - started,
    )


def _changes(records: list[Held], events: int) -> list[int]:
    """Bytes that each event adds or takes."""
    changes = [0] * (events + 1)
    for record in records:
        changes[record.born] += record.n_bytes
        if record.died != FOREVER:
            changes[record.died] -= record.n_bytes
    return changes


def _moment(ledger: Ledger, device: list[Held], at: int) -> str:
    """The pass that made the last piece before the peak, and its module."""
    last = max((r for r in device if r.born <= at), key=lambda r: r.born)
    return f"{ledger.passes[last.born_in]}, {last.module or 'outside the model'}"


def _live(record: Held, ledger: Ledger) -> LiveTensor:
    return LiveTensor(
        n_bytes=record.n_bytes,
        category=category_of(record),
        shape=record.shape,
        dtype=record.dtype,
        made_by=record.made_by,
        module=record.owner or record.module,
        moment=ledger.passes[record.born_in],
    )


def _timeline(device: list[Held], events: int) -> tuple[Moment, ...]:
    """Bytes by category, at most so many points; each is the highest total of its stretch."""
    by_category = {name: _changes([r for r in device if category_of(r) == name], events) for name in CATEGORIES}
    levels = {name: list(accumulate(changes)) for name, changes in by_category.items()}
    totals = [sum(column) for column in zip(*levels.values(), strict=True)]
    stretch = max(len(totals) // _TIMELINE_POINTS, 1)
    moments = []
    for start in range(0, len(totals), stretch):
        at = max(range(start, min(start + stretch, len(totals))), key=totals.__getitem__)
        moments.append(Moment(at=at, n_bytes={name: column[at] for name, column in levels.items()}))
    return tuple(moments)


def _highs(device: list[Held], ledger: Ledger) -> dict[tuple[str, str], dict[str, int]]:
    """The fullest point of each pass and module; an event belongs to where the last piece before it was made."""
    levels = {
        name: list(accumulate(_changes([r for r in device if category_of(r) == name], ledger.events)))
        for name in CATEGORIES
    }
    totals = [sum(column) for column in zip(*levels.values(), strict=True)]
    made = {record.born: (ledger.passes[record.born_in], record.module) for record in device}
    best: dict[tuple[str, str], tuple[int, int]] = {}
    here = ("", "")
    for at, total in enumerate(totals):
        here = made.get(at, here)
        if total > best.get(here, (-1, 0))[0]:
            best[here] = (total, at)
    return {key: {name: column[at] for name, column in levels.items()} for key, (_, at) in best.items()}


def _messages(watch: Watch, groups: Groups | None) -> tuple[Message, ...]:
    names = {} if groups is None else groups.names()
    found: dict[tuple[str, str], list[int]] = {}
    ranks: dict[str, tuple[int, ...]] = {}
    for kind, group, n_bytes in watch.messages:
        name = names.get(group.group_name, "world")
        ranks[name] = tuple(dist.get_process_group_ranks(group))
        entry = found.setdefault((name, kind), [0, 0])
        entry[0] += 1
        entry[1] += n_bytes
    return tuple(
        sorted(
            Message(group=name, kind=kind, count=count, n_bytes=n_bytes, ranks=ranks[name])
            for (name, kind), (count, n_bytes) in found.items()
        )
    )
