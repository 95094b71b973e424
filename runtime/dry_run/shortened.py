"""A step of many micro batches told from two shorter ones: once the pipeline is full, micro batches repeat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .run import dry_run
from .values import Message, Moment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cost_models.layout import Layout
    from runtime.config_values import TrainConfig

    from .values import DryRun

# Schedules whose first micro batches are all under way after so many, and then go one by one.
_ONE_BY_ONE = frozenset({"none", "1f1b"})
# Tokens, labels and copies of them are all that a step holds of a micro batch that is not under way: 8 bytes each.
_TOKEN_NUMBERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldRun:
    """A dry run and how it came about.

    Attributes:
        micro_batches: of each run that was made; of a shortened step two, otherwise all of the step's.
    """

    run: DryRun
    micro_batches: tuple[int, ...]


def shortened_dry_run(config: TrainConfig, rank: int = 0) -> ToldRun:
    """What `dry_run` finds, from two runs of fewer micro batches where that is less work.

    FLOPs, messages and the tokens in memory are continued in a straight line; the largest tensors and the timeline are
    those of the longer run. Where memory differs by more than tokens, or messages not by whole ones, the whole step is
    run.

    Raises:
        TitanPlanError: as `dry_run`.
    """
    whole = config.layout.accumulation
    pair = short_counts(config.layout)
    if pair is None:
        return ToldRun(run=dry_run(config, rank), micro_batches=(whole,))
    short, long = (dry_run(with_micro_batches(config, count), rank) for count in pair)
    run = _continued(short, long, config, pair)
    if run is not None:
        return ToldRun(run=run, micro_batches=pair)
    return ToldRun(run=dry_run(config, rank), micro_batches=(whole,))


def short_counts(layout: Layout) -> tuple[int, int] | None:
    """Micro batches of two shorter steps of a full pipeline; None where the whole step is less work.

    GPipe keeps all micro batches of a step, so no shorter step has its peak.
    """
    pair = _full_pipeline(layout)
    return pair if pair is not None and sum(pair) < layout.accumulation else None


def enough_micro_batches(layout: Layout) -> int:
    """The fewest whose step has the peak of the whole one, but for the tokens of those that are left out."""
    pair = _full_pipeline(layout)
    return layout.accumulation if pair is None else min(pair[1], layout.accumulation)


def _full_pipeline(layout: Layout) -> tuple[int, int] | None:
    pp = layout.pp
    if layout.schedule == "gpipe":
        return None
    if layout.schedule in _ONE_BY_ONE:
        return pp + 2, pp + 3  # one that is neither first nor last is among them
    if layout.schedule == "zb-v":
        return 3 * pp, 3 * pp + 1
    return 2 * pp, 3 * pp  # these take whole rounds of pp micro batches


def with_micro_batches(config: TrainConfig, accumulation: int) -> TrainConfig:
    """The same with another number of micro batches a step."""
    layout = replace(config.layout, accumulation=accumulation)
    batch = layout.dp * layout.micro_batch * accumulation
    return replace(config, layout=layout, workload=replace(config.workload, global_batch=batch))


def _continued(short: DryRun, long: DryRun, config: TrainConfig, pair: tuple[int, int]) -> DryRun | None:
    """A run of all micro batches; None where the two are not two points of one line."""
    line = _Line(pair[1] - pair[0], config.layout.accumulation - pair[1])
    if _lasting(short) != _lasting(long):
        return None
    memory = line.all(short.memory_bytes, long.memory_bytes)
    messages = line.messages(short, long)
    most = _TOKEN_NUMBERS * 8 * config.layout.micro_batch * (config.workload.seq_len + 1) * line.steps
    if memory is None or messages is None:
        return None
    if any(abs(n_bytes - short.memory_bytes[name]) > most for name, n_bytes in long.memory_bytes.items()):
        return None
    return replace(
        long,
        peak_bytes=sum(memory.values()),
        memory_bytes=memory,
        messages=messages,
        timeline=_with_buffers(long.timeline, memory["buffers"] - long.memory_bytes["buffers"]),
        forward_flops=line.at(short.forward_flops, long.forward_flops),
        backward_flops=line.at(short.backward_flops, long.backward_flops),
        seconds=short.seconds + long.seconds,
    )


def _with_buffers(timeline: tuple[Moment, ...], more: int) -> tuple[Moment, ...]:
    """Tokens of the micro batches that were left out are there all the time."""
    return tuple(
        replace(moment, n_bytes={**moment.n_bytes, "buffers": moment.n_bytes["buffers"] + more}) for moment in timeline
    )


def _lasting(run: DryRun) -> tuple[int, ...]:
    """What does not depend on the number of micro batches."""
    return run.parameter_bytes, run.gradient_bytes, run.optimizer_bytes, run.host_bytes


@dataclass(frozen=True, slots=True)
class _Line:
    """Through two points that are `steps` apart, to a third that is `left` beyond the second."""

    steps: int
    left: int

    def at(self, short: float, long: float) -> float:
        return long + (long - short) / self.steps * self.left

    def whole(self, short: int, long: int) -> int | None:
        """The same in whole numbers; None where a step is a fraction."""
        if (long - short) % self.steps:
            return None
        return long + (long - short) // self.steps * self.left

    def all(self, short: Mapping[str, int], long: Mapping[str, int]) -> dict[str, int] | None:
        found = {name: self.whole(short[name], long[name]) for name in long}
        known = {name: number for name, number in found.items() if number is not None}
        return known if len(known) == len(found) else None

    def messages(self, short: DryRun, long: DryRun) -> tuple[Message, ...] | None:
        first, second = _by_group(short), _by_group(long)
        if first.keys() != second.keys():
            return None
        found = []
        for key, message in second.items():
            count = self.whole(first[key].count, message.count)
            n_bytes = self.whole(first[key].n_bytes, message.n_bytes)
            if count is None or n_bytes is None:
                return None
            found.append(replace(message, count=count, n_bytes=n_bytes))
        return tuple(found)


def _by_group(run: DryRun) -> Mapping[tuple[str, str], Message]:
    return {(message.group, message.kind): message for message in run.messages}
