"""Every strategy, alone and combined, gives the losses and gradient norms of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.runtime.parity.cases import Case, case
from tests.runtime.parity.comparing import FULL, Bound, assert_same_curve, run

if TYPE_CHECKING:
    from tests.ranks import RankPool
    from tests.runtime.parity.comparing import Reference

STEPS = 10
ALONE = (
    case(micro_batch=1),
    case(micro_batch=8),
    case(recompute="selective"),
    case(recompute="full"),
    case(recompute=2),
    case(swap=True),
    case(offload=True),
    case(offload=True, move_all=True),
    case(offload=True, recompute="selective", move_all=True),
    case(offload=True, recompute=2, move_all=True),
    case(optimizer="sgd", dp=2),
    case(optimizer="adam", dp=2, zero=1),
    case(optimizer="sgd", dp=2, zero=2, swap=True),
    case(dp=2),
    case(dp=2, fuse=False),
    case(dp=2, overlap=False),
    case(dp=2, zero=1),
    case(dp=2, zero=2),
    case(dp=2, zero=2, reduce="every"),
    case(dp=2, zero=2, fuse=False),
    case(dp=2, zero=2, overlap=False),
    case(dp=2, zero=3),
    case(dp=2, zero=3, reduce="every"),
    case(dp=4, zero=3, shard=2),
    case(tp=2),
    case(tp=2, sp=False),
    case(tp=4),
    case(cp=2, cp_kind="ulysses"),
    case(cp=2, cp_kind="allgather"),
    case(cp=2, cp_kind="ring"),
    case(cp=4, cp_kind="ring"),
    case(pp=2),
    case(pp=2, schedule="gpipe"),
    case(pp=2, vpp=2, schedule="interleaved"),
    case(pp=2, schedule="zero-bubble"),
    case(pp=2, vpp=2, schedule="zero-bubble"),
    case(pp=2, vpp=2, schedule="zb-v"),
    case(pp=2, stages=[1, 3]),
    case(pp=3, stages=[1, 2, 1]),
    case("six", pp=2, vpp=2, schedule="zb-v", stages=[1, 2, 2, 1]),
    case("tiny-moe", dp=2),
    case("tiny-moe", tp=2),
    case("tiny-moe", tp=2, sp=False),
    case("tiny-moe", dp=2, ep=2),
    case("tiny-moe", tp=2, ep=2),
    case("tiny-moe", cp=2, cp_kind="ulysses", ep=2),
    case("tiny-moe", recompute="full"),
    case("tiny-moe", recompute="selective"),
)
COMBINED = (
    # 4 ranks
    case(tp=2, dp=2, zero=2),
    case(tp=2, dp=2, zero=3, reduce="every"),
    case(tp=2, cp=2, cp_kind="ulysses", zero=1),
    case(tp=2, cp=2, cp_kind="allgather", zero=3, recompute="full"),
    case(tp=2, cp=2, cp_kind="ring", sp=False),
    case(tp=2, pp=2, recompute="selective", schedule="zero-bubble", offload=True, move_all=True),
    case(pp=2, dp=2, zero=3, offload=True, move_all=True),
    case(pp=2, dp=2, zero=2, reduce="every", schedule="gpipe"),
    case(pp=2, dp=2, schedule="zero-bubble"),
    case(pp=2, dp=2, schedule="zero-bubble", zero=3, reduce="every"),
    case(pp=2, dp=2, vpp=2, schedule="zb-v", zero=3, recompute="full"),
    case(pp=2, dp=2, vpp=2, schedule="interleaved", zero=2, placement="tp-cp-pp-dp"),
    case(pp=2, cp=2, cp_kind="ring", schedule="zero-bubble", zero=1),
    case(cp=2, cp_kind="ulysses", dp=2, zero=2, shard=1, micro_batch=2),
    case("deep", pp=4, vpp=2, schedule="interleaved"),
    case("deep", pp=4, vpp=2, schedule="zb-v"),
    case("six", pp=4, stages=[1, 2, 2, 1], schedule="1f1b", recompute=1),
    case("tiny-moe", tp=2, dp=2, ep=2, zero=2),
    case("tiny-moe", tp=2, dp=2, ep=4, zero=1, offload=True, swap=True),
    case("tiny-moe", pp=2, dp=2, ep=2, schedule="zero-bubble", zero=2),
    case("tiny-moe", pp=2, tp=2, vpp=2, schedule="zb-v", recompute="full"),
    case("tiny-moe", cp=2, cp_kind="allgather", tp=2, ep=4, zero=3),
    # 8 ranks
    case(tp=2, pp=2, dp=2, zero=2, placement="tp-cp-pp-dp", swap=True),
    case(tp=2, cp=2, cp_kind="ulysses", pp=2, schedule="1f1b"),
    case(tp=2, cp=2, cp_kind="ring", dp=2, zero=3, recompute=1),
    case(tp=2, pp=2, dp=2, vpp=2, schedule="interleaved", zero=3, reduce="every"),
    case("tiny-moe", tp=2, pp=2, dp=2, ep=2, schedule="zero-bubble", zero=3),
    case("tiny-moe", tp=2, cp=2, cp_kind="allgather", dp=2, ep=4, zero=2),
)
VARIANTS = (
    case("mqa", cp=2, cp_kind="ulysses"),
    case("mqa", pp=2, cp=2, cp_kind="allgather", recompute="selective"),
    case("mha", tp=4, cp=2, cp_kind="ulysses"),
    case("tied", tp=2, pp=2),
    case("tied", pp=2, vpp=2, schedule="zb-v", dp=2, zero=1),
    case("tied", dp=2, zero=3),
    case("odd-vocabulary", tp=2, dp=2, zero=3),
    case("gpt2", tp=2, cp=2, cp_kind="allgather", recompute="selective"),
    case("gpt2", pp=2, dp=2, schedule="zero-bubble", zero=2),
    case("bloom", tp=2, cp=2, cp_kind="ulysses"),
    case("bloom", tp=2, cp=2, cp_kind="ring", recompute="selective"),
    case("qk-norm", tp=2, sp=False, recompute="selective"),
    case("qk-norm", tp=2, pp=2, dp=2, zero=3),
    case("window", tp=2, cp=2, cp_kind="ring"),
    case("window", cp=2, cp_kind="allgather"),
    case("biases", tp=2, pp=2, schedule="zero-bubble"),
    case("biases", tp=2, sp=False),
    case("mla", tp=2, cp=2, cp_kind="ulysses"),
    case("mla-q", tp=2, dp=2, zero=3, recompute="selective"),
    case("mla-q", tp=2, cp=2, cp_kind="ring", sp=False),
    case("mla-q", pp=2, schedule="zero-bubble"),
    case("moe-shared", tp=2, dp=2, ep=2, zero=3),
    case("moe-gate", tp=2, ep=2, schedule="zero-bubble", pp=2),
    case("moe-gate", tp=2, sp=False),
    case("moe-dense", dp=2, ep=2, zero=3, recompute="full"),
    case("moe-bias", tp=2, dp=2, ep=4, recompute="full"),
    case("moe-deepseek", tp=2, dp=2, ep=4, zero=2),
    case("moe-plain", tp=2, recompute="selective"),
)
ROUNDED = (
    case(precision="bf16", dp=2),
    case(precision="bf16", tp=2, dp=2, zero=2),
    case(precision="bf16", tp=2, pp=2, schedule="zero-bubble"),
    case(precision="bf16", pp=2, dp=2, zero=3, recompute="selective"),
    case(precision="bf16", cp=2, cp_kind="ring", zero=1),
    case(precision="bf16", offload=True, move_all=True, swap=True),
    case("tiny-moe", precision="bf16", tp=2, dp=2, ep=2, zero=3),
    case("gpt2", precision="bf16", tp=2, pp=2),
    case(precision="fp16", loss_scale=1024.0, tp=2, dp=2, zero=2),
    case("tied", precision="fp16", loss_scale=1024.0, pp=2),
)


def _named(cases: tuple[Case, ...]) -> pytest.MarkDecorator:
    assert len({c.name for c in cases}) == len(cases)
    return pytest.mark.parametrize("given", cases, ids=[c.name for c in cases])


@_named(ALONE + COMBINED + VARIANTS)
def test_a_layout_trains_like_one_process(given: Case, ranks: RankPool, reference: Reference) -> None:
    assert_same_curve(run(ranks, given, STEPS), reference(given), FULL)


@_named(ROUNDED)
def test_a_layout_trains_like_one_process_in_low_precision(given: Case, ranks: RankPool, reference: Reference) -> None:
    assert_same_curve(run(ranks, given, STEPS), reference(given), ROUNDED_BOUND)
