"""The cost model predicts every message of a step: kind, group, count and bytes equal what the real trainer sends."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from cost_models.rank_traffic import rank_messages
from tests.runtime.dry_run.layouts import Case, case, counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cost_models.rank_traffic import RankMessage
    from runtime.dry_run import Message

TENSOR = [
    case("gqa", tp=2),
    case("gqa", tp=2, sp=True, micro_batch=2),
    case("mha", tp=4, rank=3, precision="fp32"),
    case("gqa", tp=2, sp=True, accumulation=2, seq_len=128),
    case("mqa", dp=2, tp=1, zero=2),
    case("gpt", tp=2, sp=True, rank=1),
    case("gpt", tp=2, rank=1),
    case("alibi", tp=2, sp=True),
    case("window", tp=2),
    case("plain-latent", tp=2, sp=True),
    case("plain-latent", tp=2),
]
DATA = [
    case("gqa"),
    case("gqa", dp=4),
    case("wide", dp=2, accumulation=2),
    case("wide", dp=2, precision="fp32"),
    case("gqa", dp=2, zero=1, accumulation=3),
    case("gqa", dp=4, zero=2, dp_shard=2, accumulation=2, reduce_gradients="every"),
    case("gqa", dp=4, zero=3, dp_shard=2, accumulation=2),
    case(
        "four", rank=4, pp=2, vpp=2, dp=4, zero=2, dp_shard=2, schedule="zb-v", accumulation=4, reduce_gradients="every"
    ),
    case("mha", dp=4, zero=3, rank=2, accumulation=2, reduce_gradients="every"),
    case("gpt", dp=4, zero=3, tp=2, sp=True, rank=5, precision="fp32"),
    case("gpt", dp=8, zero=1, dp_shard=4, rank=7),
    case("gqa", dp=2, zero=2, swap_optimizer=True, activation_offload=True),
    case("gqa", dp=2, tp=2, sp=True, zero=2, placement="tp-cp-pp-dp", rank=3),
]
RECOMPUTED = [
    case("gqa", tp=2, sp=True, recompute="full"),
    case("gqa", tp=2, recompute="full", recompute_layers=1),
    case("gqa", tp=2, sp=True, recompute="selective"),
    case("gqa", dp=2, zero=3, recompute="full", accumulation=2),
    case("moe", tp=2, sp=True, recompute="full"),
    case("shared", tp=2, recompute="full"),
    case("latent", tp=2, sp=True, ep=4, dp=2, zero=3, recompute="full"),
    case("gqa", cp=2, cp_kind="ring", recompute="full"),
]
CONTEXT = [
    case("gqa", cp=4, cp_kind="ulysses", rank=1),
    case("gqa", cp=2, tp=2, sp=True, cp_kind="ulysses", zero=3),
    case("gqa", cp=2, cp_kind="allgather", zero=1, rank=1),
    case("gqa", cp=4, cp_kind="ring", rank=2),
    case("window", cp=2, cp_kind="ring"),
    case("alibi", cp=2, cp_kind="ring", tp=2),
    case("latent", cp=2, cp_kind="allgather", tp=2, sp=True, dp=2),
]
EXPERTS = [
    case("moe", dp=2),
    case("moe", dp=2, precision="fp32", ep=2),
    case("moe", tp=2),
    case("moe", tp=2, sp=True, ep=2, dp=2, zero=2),
    case("shared", tp=2, sp=True, ep=8, dp=4, rank=5),
    case("shared", ep=4, dp=4, zero=3, accumulation=2),
    case("shared", ep=2, dp=8, zero=2, dp_shard=4, rank=6, accumulation=2, reduce_gradients="every"),
    case("latent", ep=4, dp=4, cp=2, cp_kind="ulysses", tp=2, sp=True, zero=1, rank=9),
]
PIPELINES = [
    case("four", pp=2, schedule="gpipe", accumulation=2),
    case("four", rank=1, pp=4, schedule="1f1b", accumulation=4),
    case("tied", rank=2, pp=2, schedule="1f1b", accumulation=2, dp=2, zero=2),
    case("four", rank=3, pp=2, schedule="1f1b", accumulation=4, dp=2, zero=3),
    case("four", rank=1, pp=2, schedule="gpipe", accumulation=4, dp=2, zero=3, reduce_gradients="every"),
    case("eight", rank=2, pp=4, vpp=2, schedule="interleaved", accumulation=4, tp=2, sp=True),
    case("tied", rank=3, pp=2, vpp=2, schedule="interleaved", accumulation=4, dp=2, zero=1, recompute="full"),
    case("tied", rank=2, pp=2, schedule="zero-bubble", accumulation=4, dp=2, zero=3),
    case("gpt", rank=1, pp=2, schedule="zero-bubble", accumulation=4, dp=2, zero=2, reduce_gradients="every"),
    case("tied", rank=1, pp=2, vpp=2, schedule="zb-v", accumulation=4),
    case("four", rank=2, pp=2, vpp=2, schedule="zb-v", accumulation=4, dp=2, zero=3, reduce_gradients="every"),
    case("moe", rank=3, pp=2, schedule="gpipe", accumulation=4, dp=2, zero=3, reduce_gradients="every"),
    case("moe", rank=3, pp=2, schedule="zero-bubble", accumulation=2, ep=2, dp=2, zero=2),
    case("eight", rank=17, pp=2, dp=4, tp=4, cp=2, cp_kind="ring", schedule="1f1b", accumulation=2, micro_batch=2),
]
CASES = (*TENSOR, *DATA, *RECOMPUTED, *CONTEXT, *EXPERTS, *PIPELINES)


def totals(messages: Iterable[Message] | Iterable[RankMessage]) -> dict[tuple[str, tuple[int, ...]], tuple[int, int]]:
    """Count and bytes by kind and ranks: groups of the same ranks may share a communicator, and then a name."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    n_bytes: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for message in messages:
        key = (message.kind, tuple(sorted(message.ranks)))
        counts[key] += message.count
        n_bytes[key] += message.n_bytes
    return {key: (counts[key], n_bytes[key]) for key in counts}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_predicted_messages_are_those_that_the_trainer_sends(case: Case) -> None:
    config = case.config
    predicted = totals(rank_messages(case.setting, config.layout, case.rank))
    assert predicted == totals(counted(case).messages)
