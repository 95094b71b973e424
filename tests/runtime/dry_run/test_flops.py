"""The cost model predicts the FLOPs of a step, forward and backward apart, as the real trainer computes them."""

from __future__ import annotations

import pytest

from cost_models.rank_flops import rank_flops
from tests.runtime.dry_run.layouts import Case, case, counted

CASES = (
    case("gqa", micro_batch=2),
    case("mha", tp=2, accumulation=2),
    case("gpt", tp=2, sp=True, recompute="full"),
    case("mqa", dp=2, zero=3, recompute="selective"),
    case("gqa", recompute="full", recompute_layers=1, precision="fp32"),
    case("window"),
    case("alibi", cp=2, cp_kind="ring"),
    case("window", cp=2, cp_kind="allgather"),
    case("gqa", cp=4, cp_kind="ring", rank=3, seq_len=128),
    case("gqa", cp=2, cp_kind="ulysses", rank=1),
    case("latent", tp=2, sp=True, recompute="full"),
    case("plain-latent", seq_len=128),
    case("moe", ep=2, dp=2, zero=2, recompute="full"),
    case("shared", tp=2),
    case("four", rank=1, pp=2, schedule="1f1b", accumulation=2),
    case("tied", rank=0, pp=2, schedule="zero-bubble", accumulation=4),
    case("four", rank=1, pp=2, vpp=2, schedule="zb-v", accumulation=4, recompute="full"),
    case("moe", rank=1, pp=2, schedule="zero-bubble", accumulation=2),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_predicted_flops_are_those_that_the_trainer_computes(case: Case) -> None:
    predicted, found = rank_flops(case.setting, case.config.layout, case.rank), counted(case)
    assert predicted.forward == pytest.approx(found.forward_flops, rel=1e-3)
    assert predicted.backward == pytest.approx(found.backward_flops, rel=1e-3)
