"""The rates of a step, by hand and against the planner's own arithmetic."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster, find_model
from cost_models.layout import Layout
from cost_models.prediction import model_flops, peak_flops_per_device
from cost_models.setting import Setting
from cost_models.stack import TITAN
from cost_models.workload import Workload
from runtime.config import PlanSummary, TrainConfig, load_config
from runtime.metrics import StepMeter, StepRecord, mfu

GUIDE = Path(__file__).parents[2] / "configs" / "examples" / "llama70b-64npu-guide.yaml"
TINY = TrainConfig(
    model=find_model("tiny"),
    workload=Workload(seq_len=128, global_batch=16),
    layout=Layout(tp=2, dp=4, micro_batch=2, accumulation=2),
)


def record(meter: StepMeter, step_time_s: float = 2.0, memory_bytes: int = 3 * 2**29) -> StepRecord:
    return meter.make_record(
        step=1, loss=2.0, grad_norm=1.0, learning_rate=1e-4, step_time_s=step_time_s, memory_bytes=memory_bytes
    )


def test_tokens_and_memory_of_a_step_by_hand() -> None:
    got = record(StepMeter(TINY))
    assert got.tokens_per_s_per_device == 128 * 16 / (2.0 * 8)
    assert got.memory_gib == 1.5
    assert (got.skipped, got.loss_scale, got.balance_loss) == (False, None, None)


def test_mfu_of_the_guides_run_by_hand() -> None:
    """LLaMA-2 70B: 6 FLOPs a GEMM weight and token, and half of the attention, on 64 devices of 353.9 TFLOPS."""
    meter = StepMeter(replace(load_config(GUIDE), cluster="atlas-800t-a2"))
    layer = 8192 * (8192 * 2 + 1024 * 2) + 3 * 8192 * 28672
    gemm = 6 * (80 * layer + 32000 * 8192) * 4096
    attention = 3 * 80 * 2 * 2 * 8192 * 4096 * 4096 / 2
    assert meter.model_flops_per_step == pytest.approx(256 * (gemm + attention), rel=1e-12)
    assert record(meter, 50.0).mfu == pytest.approx(256 * (gemm + attention) / (50.0 * 64 * 353.9e12), rel=1e-9)


@pytest.mark.parametrize("cluster", ["atlas-800t-a2", "dgx-h100", "local"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("model", ["tiny", "tiny-moe", "llama2-7b", "deepseek-v3"])
def test_flops_and_peak_are_those_of_the_planner(model: str, precision: str, cluster: str) -> None:
    config = replace(
        TINY, model=find_model(model), workload=replace(TINY.workload, precision=precision), cluster=cluster
    )
    where = find_cluster(cluster)
    setting = Setting(
        model=config.model,
        cluster=where,
        workload=config.workload,
        calibration=calibration_of(where.device.name),
        stack=TITAN,
        n_devices=8,
    )
    meter = StepMeter(config)
    assert meter.model_flops_per_step == model_flops(setting)
    assert meter.peak_flops == peak_flops_per_device(setting)


def test_without_a_cluster_there_is_no_mfu() -> None:
    meter = StepMeter(TINY)
    assert (meter.peak_flops, meter.no_peak_because, record(meter).mfu) == (None, "", None)


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [("atlas-9000", "unknown cluster"), ("gone.yaml", "gone.yaml"), ("atlas-800-910a", "no bf16")],
)
def test_a_cluster_that_cannot_tell_its_peak_leaves_mfu_out_and_says_why(cluster: str, reason: str) -> None:
    meter = StepMeter(replace(TINY, cluster=cluster))
    assert record(meter).mfu is None
    assert reason in meter.no_peak_because


def test_a_plan_for_another_layout_is_not_compared_with() -> None:
    plan = PlanSummary(version="1", layout=TINY.layout.name, step_time_s=1.0, peak_bytes=1)
    assert StepMeter(replace(TINY, plan=plan)).plan is plan
    assert StepMeter(replace(TINY, plan=replace(plan, layout="tp8-pp1-dp1-mbs1-z0"))).plan is None
    assert StepMeter(TINY).plan is None


def test_mfu_is_a_share_of_one() -> None:
    assert mfu(8e12, 2.0, 4, 2e12) == 0.5
    assert mfu(8e12, 2.0, 4, None) is None


def test_a_clock_that_stands_still_gives_no_rate() -> None:
    assert math.isnan(record(StepMeter(TINY), 0.0).tokens_per_s_per_device)


def test_metrics_need_no_torch() -> None:
    program = (
        "import sys, runtime.metrics, runtime.metrics_files, runtime.step_line, runtime.faults\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
