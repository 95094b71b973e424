"""A dry run of a deep model told from shallow ones: layers repeat, so every moment grows with them in a straight line.

Which moment is the fullest changes with depth, so each is continued by itself: the fullest point of each pass in each
module, layers counted from both ends of their virtual stage. The fullest of those is the peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cost_models.rank_grid import RankGrid

from .run import dry_run
from .shortened import enough_micro_batches, with_micro_batches

if TYPE_CHECKING:
    from cost_models.layout import Layout
    from runtime.config_values import TrainConfig

    from .values import DryRun

SHALLOW = 4
"""Layers of a virtual stage in the first run, or of each part of it: two at each end are told apart."""
_ENDS = 2
_FP32_BYTES = 4

_Highs = dict[tuple[str, str], Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedRun:
    """The peak of a rank.

    Attributes:
        memory_bytes: live bytes at the peak by category.
        moment: the pass and the module.
        layers: of a virtual stage in the runs that were made; the real number where the whole was run.
    """

    rank: int
    peak_bytes: int
    memory_bytes: Mapping[str, int]
    moment: str
    layers: tuple[int, ...]
    seconds: float


def reduced_dry_run(config: TrainConfig, rank: int = 0) -> ReducedRun:
    """The peak that `dry_run` finds, from runs of fewer layers and micro batches where that is less work.

    Raises:
        TitanPlanError: as `dry_run`.
    """
    whole, few = _parts_of(config), enough_micro_batches(config.layout)
    short = with_micro_batches(config, few)
    base = tuple(min(layers, SHALLOW) for layers in whole)
    deeper = [_one_deeper(base, place) for place, layers in enumerate(whole) if layers > SHALLOW]
    if _uneven(config) or sum(map(sum, (base, *deeper))) >= sum(whole):
        highs, seconds = _run(short, rank)
        depths: tuple[int, ...] = (sum(whole),)
    else:
        first, seconds = _run(_of_parts(short, base), rank)
        highs, depths = first, tuple(sum(parts) for parts in (base, *deeper))
        for parts in deeper:
            second, more = _run(_of_parts(short, parts), rank)
            left = sum(w - b for w, b, p in zip(whole, base, parts, strict=True) if p != b)
            highs, seconds = _continued(highs, first, second, left), seconds + more
    key = max(highs, key=lambda k: sum(highs[k].values()))
    memory = dict(highs[key])
    left = config.layout.accumulation - few
    memory["buffers"] += left * _tokens(config)
    memory["activations"] += left * _loss(config, rank)
    return ReducedRun(
        rank=rank,
        peak_bytes=sum(memory.values()),
        memory_bytes=memory,
        moment=", ".join(key),
        layers=depths,
        seconds=seconds,
    )


def _run(config: TrainConfig, rank: int) -> tuple[_Highs, float]:
    run = dry_run(config, rank)
    return _highs(run, config.layout, config.model.n_layers), run.seconds


def _uneven(config: TrainConfig) -> bool:
    """Whether layers of a virtual stage differ, so that more than their number grows."""
    return config.model.moe is not None and config.model.dense_layers > 0


def _parts_of(config: TrainConfig) -> tuple[int, ...]:
    """Layers of a virtual stage that is not short: all, or those that are recomputed and those that are not."""
    x = config.layout
    depth = (config.model.n_layers + x.short_first + x.short_last) // (x.pp * x.vpp)
    return (x.recompute_layers, depth - x.recompute_layers) if x.recompute_layers else (depth,)


def _one_deeper(parts: tuple[int, ...], place: int) -> tuple[int, ...]:
    return (*parts[:place], parts[place] + 1, *parts[place + 1 :])


def _of_parts(config: TrainConfig, parts: tuple[int, ...]) -> TrainConfig:
    x = config.layout
    n_layers = sum(parts) * x.pp * x.vpp - x.short_first - x.short_last
    layout = replace(x, recompute_layers=parts[0] if len(parts) > 1 else 0)
    return replace(config, model=replace(config.model, n_layers=n_layers), layout=layout)


def _highs(run: DryRun, layout: Layout, n_layers: int) -> _Highs:
    """The fullest point of each pass and module, layers told by their place in their virtual stage."""
    found: _Highs = {}
    starts = [0]
    for layers in layout.stage_layers(n_layers):
        starts.append(starts[-1] + layers)
    for (pass_, module), memory in run.highs.items():
        key = pass_, _placed(module, starts, layout.recompute_layers)
        if sum(memory.values()) > sum(found.get(key, {}).values()):
            found[key] = memory
    return found


def _placed(module: str, starts: list[int], recomputed: int) -> str:
    parts = module.split(".")
    if parts[0] != "layers" or len(parts) < 2:
        return module
    index = int(parts[1])
    stage = next(i for i in range(len(starts) - 1) if starts[i] <= index < starts[i + 1])
    start, stop, of = starts[stage], starts[stage + 1], ""
    if recomputed:
        again = index < start + recomputed
        start, stop = (start, min(start + recomputed, stop)) if again else (start + recomputed, stop)
        of = " of the recomputed" if again else " of the kept"
    from_first, from_last = index - start, stop - 1 - index
    place = f"{from_first} from first" if from_first < _ENDS else f"{from_last} from last"
    place = place if min(from_first, from_last) < _ENDS else "inner"
    return ".".join([f"stage {stage} layer {place}{of}", *parts[2:]])


def _continued(highs: _Highs, first: _Highs, second: _Highs, left: int) -> _Highs:
    """Each point, so many layers beyond the first run of two that are one layer apart."""
    return {
        key: {name: n_bytes + (second[key][name] - first[key][name]) * left for name, n_bytes in high.items()}
        for key, high in highs.items()
        if key in second
    }


def _tokens(config: TrainConfig) -> int:
    """Bytes of a micro batch's sequences, tokens and labels."""
    x, seq_len = config.layout, config.workload.seq_len
    return 8 * x.micro_batch * (seq_len + 1 + 2 * seq_len // x.cp)


def _loss(config: TrainConfig, rank: int) -> int:
    """Bytes of a micro batch's loss, which a pipeline's last stage keeps to the end of the step."""
    x = config.layout
    last = RankGrid.of(x).ranks[0 if x.schedule == "zb-v" else -1]
    return _FP32_BYTES if x.pp > 1 and rank in last else 0
