"""FLOPs of one rank against those of the whole model, by what all ranks together must compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster, find_model
from cost_models.layout import Layout
from cost_models.model import ModelSpec
from cost_models.rank_flops import RankFlops, rank_flops
from cost_models.setting import Setting
from cost_models.stack import TITAN
from cost_models.workload import Workload

SEQ = 4096


def flops(model: ModelSpec, layout: Layout, rank: int = 0) -> RankFlops:
    batch = layout.dp * layout.micro_batch * layout.accumulation
    setting = Setting(
        model=model,
        workload=Workload(seq_len=SEQ, global_batch=batch),
        cluster=find_cluster("atlas-800t-a2"),
        stack=TITAN,
        calibration=calibration_of("local-cpu"),
        n_devices=layout.devices,
    )
    return rank_flops(setting, layout, rank)


def asked(model: ModelSpec, batch: int) -> float:
    """Forward and backward of the model, scores made again in backward, the diagonal of the mask included."""
    gemms = 6.0 * model.matmul_params_per_token() * SEQ
    qk, v = model.qk_head_dim, model.v_head_dim
    pairs = SEQ * (SEQ + 1) / 2
    return batch * (gemms + 2.0 * model.n_layers * model.n_heads * pairs * (qk + v + 3 * qk + 2 * v))


@pytest.mark.parametrize("name", ["llama2-7b", "llama3.1-8b", "mixtral-8x7b", "deepseek-v2-lite"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(micro_batch=2),
        Layout(tp=2, sp=True, dp=2, accumulation=2),
        Layout(cp=2, cp_kind="ring", tp=2, sp=True),
        Layout(cp=2, cp_kind="ulysses"),
        Layout(dp=8, dp_shard=8, zero=3),
    ],
    ids=lambda layout: layout.name,
)
def test_all_ranks_together_compute_the_model(name: str, layout: Layout) -> None:
    model = replace(find_model(name), n_layers=4)
    total = sum(flops(model, layout, rank).total for rank in range(layout.devices))
    batch = layout.dp * layout.micro_batch * layout.accumulation
    # Two chunks a rank: the diagonal of the mask is that of the sequence all the same.
    assert total == pytest.approx(asked(model, batch), rel=1e-12)


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zb-v", 2)])
def test_a_pipeline_computes_the_same_whoever_holds_which_stage(schedule: str, vpp: int) -> None:
    model = replace(find_model("llama2-7b"), n_layers=8)
    layout = Layout(pp=4, vpp=vpp, schedule=schedule, accumulation=8)
    total = sum(flops(model, layout, rank).total for rank in range(4))
    assert total == pytest.approx(asked(model, 8), rel=1e-12)


def test_full_recompute_runs_the_forward_of_layers_again_and_not_the_head() -> None:
    """4 layers. The loss makes its gradients in its forward, three products in all; down projections are not redone."""
    model = replace(find_model("llama2-7b"), n_layers=4)
    plain, full, half = (
        flops(model, Layout(recompute=kind, recompute_layers=some))
        for kind, some in (("none", 0), ("full", 0), ("full", 2))
    )
    head, down = 3 * 2.0 * SEQ * 4096 * 32000, 4 * 2.0 * SEQ * 4096 * 11008
    again = plain.forward - head - down
    assert full.forward == half.forward == plain.forward
    assert full.backward - plain.backward == pytest.approx(again, rel=1e-12)
    assert half.backward - plain.backward == pytest.approx(again / 2, rel=1e-12)


def test_selective_recompute_makes_no_product_again() -> None:
    model = replace(find_model("llama2-7b"), n_layers=4)
    assert flops(model, Layout(recompute="selective")) == flops(model, Layout())
