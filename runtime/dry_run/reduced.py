"""A dry run of a deep model told from shallow ones: layers repeat, so every moment grows with them in a straight line.

Which moment is the fullest changes with depth, so each is continued by itself: the fullest point of each pass in each
module, layers counted from both ends of their virtual stage. The fullest of those is the peak.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cost_models.rank_grid import RankGrid

from .run import dry_run
from .shortened import enough_micro_batches, with_micro_batches

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cost_models.layout import Layout
    from runtime.config_values import TrainConfig

    from .values import DryRun

SHALLOW = (4, 5)
"""Layers of a virtual stage in the two runs: two at each end of it are told apart."""
_ENDS = 2
_FP32_BYTES = 4


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


def reduced_dry_run(config: TrainConfig, rank: int = 0, shallow: tuple[int, int] = SHALLOW) -> ReducedRun:
    """The peak that `dry_run` finds, from runs of fewer layers and micro batches where that is less work.

    Raises:
        TitanPlanError: as `dry_run`.
    """
    whole = _depth(config)
    long = enough_micro_batches(config.layout)
    if whole <= shallow[1] or _uneven(config):
        run = dry_run(with_micro_batches(config, long), rank)
        depths: tuple[int, ...] = (whole,)
        highs, seconds = _highs(run, config.layout, config.model.n_layers), run.seconds
    else:
        first, second = (_of_depth(config, depth) for depth in shallow)
        runs = [dry_run(with_micro_batches(each, long), rank) for each in (first, second)]
        pair = [
            _highs(run, config.layout, each.model.n_layers) for run, each in zip(runs, (first, second), strict=True)
        ]
        highs = _continued(*pair, steps=shallow[1] - shallow[0], left=whole - shallow[1])
        depths, seconds = shallow, sum(run.seconds for run in runs)
    key = max(highs, key=lambda k: sum(highs[k].values()))
    memory = dict(highs[key])
    left = config.layout.accumulation - long
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


def _uneven(config: TrainConfig) -> bool:
    """Whether layers of a virtual stage differ, so that more than their number grows."""
    mixed = config.model.moe is not None and config.model.dense_layers > 0
    return mixed or config.layout.recompute_layers > 0


def _depth(config: TrainConfig) -> int:
    """Layers of a virtual stage that is not short."""
    x = config.layout
    return (config.model.n_layers + x.short_first + x.short_last) // (x.pp * x.vpp)


def _of_depth(config: TrainConfig, depth: int) -> TrainConfig:
    x = config.layout
    n_layers = depth * x.pp * x.vpp - x.short_first - x.short_last
    return replace(config, model=replace(config.model, n_layers=n_layers))


def _highs(run: DryRun, layout: Layout, n_layers: int) -> dict[tuple[str, str], Mapping[str, int]]:
    """The fullest point of each pass and module, layers told by their place in their virtual stage."""
    found: dict[tuple[str, str], Mapping[str, int]] = {}
    starts = [0]
    for layers in layout.stage_layers(n_layers):
        starts.append(starts[-1] + layers)
    for (pass_, module), memory in run.highs.items():
        key = pass_, _placed(module, starts)
        if sum(memory.values()) > sum(found.get(key, {}).values()):
            found[key] = memory
    return found


def _placed(module: str, starts: list[int]) -> str:
    parts = module.split(".")
    if parts[0] != "layers" or len(parts) < 2:
        return module
    index = int(parts[1])
    stage = next(i for i in range(len(starts) - 1) if starts[i] <= index < starts[i + 1])
    from_first, from_last = index - starts[stage], starts[stage + 1] - 1 - index
    place = f"{from_first} from first" if from_first < _ENDS else f"{from_last} from last"
    place = place if min(from_first, from_last) < _ENDS else "inner"
    return ".".join([f"stage {stage} layer {place}", *parts[2:]])


def _continued(
    first: dict[tuple[str, str], Mapping[str, int]],
    second: dict[tuple[str, str], Mapping[str, int]],
    *,
    steps: int,
    left: int,
) -> dict[tuple[str, str], Mapping[str, int]]:
    """Each point of both runs, so many layers beyond the second."""
    return {
        key: {name: high + (high - first[key][name]) * left // steps for name, high in second[key].items()}
        for key in second
        if key in first
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
