"""How many elements one rank updates, and how many its gradients take: exact where shards are not alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cost_models.rank_messages import RankGroups
from cost_models.rank_parameters import chunk_parameters
from cost_models.rank_shards import own_numel, padded_numel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cost_models.layout import Layout
    from cost_models.model import ModelSpec
    from cost_models.rank_parameters import Parameter


def updated_elements(model: ModelSpec, layout: Layout, rank: int) -> int:
    """Elements of parameters that the rank's optimizer updates, without padding."""
    return sum(own_numel(p.shape, shards, place) for p, shards, place in _shards(model, layout, rank))


def gradient_elements(model: ModelSpec, layout: Layout, rank: int) -> int:
    """Elements of reduced gradients: a shard is as long as the longest of its parameter."""
    return sum(padded_numel(p.shape, shards) // shards for p, shards, _ in _shards(model, layout, rank))


def _shards(model: ModelSpec, layout: Layout, rank: int) -> Iterator[tuple[Parameter, int, int]]:
    """Each parameter of the rank, over how many ranks it is sharded, and which shard is the rank's."""
    groups = RankGroups(layout, rank)
    for stage in layout.stages_on(groups.at.pp):
        for parameter in chunk_parameters(model, layout, stage):
            mesh = f"{groups.mesh_of(expert=parameter.expert)}_shard"
            sharded = layout.zero > 0
            yield parameter, groups.size(mesh) if sharded else 1, groups.place(mesh) if sharded else 0
