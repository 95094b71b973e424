"""ZeRO-0 on one rank: gradients are summed over copies in buckets, filled as the trainer fills them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cost_models.rank_messages import RankGroups, Tally
    from cost_models.rank_parameters import Parameter

_BUCKET_BYTES = 25 * 2**20
_FIRST_BUCKET_BYTES = 2**20
_FEWEST_MESSAGES = 4
_FP32 = 4


class BucketTraffic:
    """Gradients of one stage in full-precision buckets, from the last parameter to the first."""

    def __init__(self, groups: RankGroups, *, low_precision: bool) -> None:
        self._groups, self._low = groups, low_precision

    def tell(self, tally: Tally, parameters: Sequence[Parameter]) -> None:
        """One sum a bucket. In full precision a gradient that nobody else has stays out of the buckets."""
        named = [(p, self._groups.mesh_of(expert=p.expert) + "_replicate") for p in reversed(parameters)]
        for group, n_bytes in self._buckets([(p, g) for p, g in named if self._low or self._groups.size(g) > 1]):
            tally.add(group, "all_reduce", n_bytes)

    def _buckets(self, filled: Sequence[tuple[Parameter, str]]) -> list[tuple[str, int]]:
        total = sum(p.numel * _FP32 for p, _ in filled)
        most = min(_BUCKET_BYTES, max(total // _FEWEST_MESSAGES, _FIRST_BUCKET_BYTES))
        open_: dict[bool, int] = {}
        buckets: list[tuple[str, int]] = []
        for parameter, group in filled:
            at = open_.get(parameter.expert)
            first = at is None or at == next(i for i, (g, _) in enumerate(buckets) if self._same(g, group))
            if at is None or buckets[at][1] >= (min(_FIRST_BUCKET_BYTES, most) if first else most):
                at = open_[parameter.expert] = len(buckets)
                buckets.append((group, 0))
            buckets[at] = (group, buckets[at][1] + parameter.numel * _FP32)
        return buckets

    def _same(self, one: str, other: str) -> bool:
        """Groups of a single rank are all no group."""
        return one == other or self._groups.size(one) == self._groups.size(other) == 1
