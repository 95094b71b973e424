"""Compute time against the two roofs of the device, against FLOPs by hand, and by what a faster device must do."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.calibration import Calibration, calibration_of
from cost_models.catalog import find_cluster, find_model, list_clusters
from cost_models.cluster import DeviceSpec
from cost_models.compute import ComputeModel
from cost_models.layout import Layout, Layouts
from cost_models.model import ModelSpec
from cost_models.operators import Operator, OperatorTable, Shapes
from cost_models.stack import STACKS, TITAN, Stack
from cost_models.workload import Workload

CLUSTERS = ("atlas-800t-a2", "dgx-h100", "dgx-a100-80g", "v100-32g", "local")
PRECISION = {"v100-32g": "fp16"}
sizes = st.integers(1, 40_000)


@cache
def device(cluster: str) -> DeviceSpec:
    return find_cluster(cluster).device


def compute(
    cluster: str = "atlas-800t-a2",
    *,
    workload: Workload | None = None,
    stack: Stack = TITAN,
    spec: DeviceSpec | None = None,
    calibration: Calibration | None = None,
) -> ComputeModel:
    found = spec or device(cluster)
    return ComputeModel(
        device=found,
        calibration=calibration or calibration_of(found.name),
        workload=workload or Workload(seq_len=4096, global_batch=1, precision=PRECISION.get(cluster, "bf16")),
        stack=stack,
    )


def gemm(model: ComputeModel, m: int, k: int, n: int, count: int = 1) -> float:
    return float(model.gemm_s(*(np.array([float(size)]) for size in (m, k, n)), float(count)).item())


def layer(
    model: ModelSpec, workload: Workload, layout: Layout | None = None, stack: Stack = TITAN
) -> tuple[Operator, ...]:
    shapes = Shapes.of(Layouts.of([layout or Layout()]), workload)
    return OperatorTable(model, workload, stack, shapes).dense_layer()


# --- GEMMs ---


@pytest.mark.parametrize("cluster", CLUSTERS)
@given(m=sizes, k=sizes, n=sizes, count=st.integers(1, 64))
@settings(max_examples=40, deadline=None)
def test_no_gemm_beats_the_peak_or_the_memory(cluster: str, m: int, k: int, n: int, count: int) -> None:
    model = compute(cluster)
    found, precision = device(cluster), model.workload.precision
    arithmetic = 2.0 * m * k * n * count / found.peak_flops(precision)
    memory = (m * k + k * n + m * n) * count * 2 / found.memory_bandwidth_bytes_per_s
    assert gemm(model, m, k, n, count) > max(arithmetic, memory)


@given(m=sizes, k=sizes, n=sizes, more=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_a_gemm_with_a_longer_inner_size_or_more_products_never_takes_less(m: int, k: int, n: int, more: int) -> None:
    model = compute()
    assert gemm(model, m, k, n) <= gemm(model, m, k * more, n)
    assert gemm(model, m, k, n) <= gemm(model, m, k, n, more) * (1 + 1e-12)


@given(m=sizes, k=sizes, n=sizes)
@settings(max_examples=60, deadline=None)
def test_a_faster_device_never_takes_longer_for_a_gemm(m: int, k: int, n: int) -> None:
    slow = device("atlas-800t-a2")
    arithmetic = replace(slow, peak_flops_by_precision=tuple((p, 2 * v) for p, v in slow.peak_flops_by_precision))
    memory = replace(slow, memory_bandwidth_bytes_per_s=2 * slow.memory_bandwidth_bytes_per_s)
    for fast in (arithmetic, memory):
        assert gemm(compute(spec=fast), m, k, n) <= gemm(compute(), m, k, n)


def test_a_large_gemm_reaches_the_share_of_the_peak_that_the_calibration_says() -> None:
    model, found = compute(), device("atlas-800t-a2")
    size = found.gemm_tile_m * found.cores * 8
    reached = 2.0 * size**3 / gemm(model, size, size, size) / found.peak_flops("bf16")
    assert reached == pytest.approx(model.calibration.gemm_efficiency, rel=0.02)


def test_cutting_a_gemm_over_tp_loses_efficiency() -> None:
    """Each rank's part of 1/8 takes more than 1/8: the same ends, and tiles that do not fill all cores."""
    model = compute()
    whole, part = gemm(model, 4096, 8192, 28672), gemm(model, 4096, 8192, 28672 // 8)
    assert whole / 8 < part < whole


def test_one_row_is_bound_by_reading_the_weights() -> None:
    model, found = compute(), device("atlas-800t-a2")
    seconds = gemm(model, 1, 8192, 8192) - model.calibration.gemm_launch_s
    memory = 8192 * 8192 * 2 / found.memory_bandwidth_bytes_per_s / model.calibration.vector_efficiency
    assert seconds == pytest.approx(memory, rel=0.01)


# --- FLOPs and passes ---


@pytest.mark.parametrize("name", ["llama2-7b", "gpt3-175b", "qwen3-8b"])
def test_backward_has_two_products_for_each_of_forward(name: str) -> None:
    workload = Workload(seq_len=2048, global_batch=1, fused_attention=False)
    time = compute(workload=workload).part_time(layer(find_model(name), workload))
    assert time.backward_flops.item() == pytest.approx(2 * time.forward_flops.item(), rel=1e-12)


def test_fused_attention_computes_the_scores_once_more_in_backward() -> None:
    """FlashAttention (arXiv:2205.14135): five products backward against two forward."""
    workload = Workload(seq_len=2048, global_batch=1)
    operators = layer(find_model("llama2-7b"), workload)
    time = compute(workload=workload).part_time(operators)
    scores = 4.0 * 32 * 128 * 2048**2 / 2
    assert time.backward_flops.item() - 2 * time.forward_flops.item() == pytest.approx(scores / 2, rel=1e-9)


@pytest.mark.parametrize(
    ("stack", "share"), [("megatron", 1.0), ("titan", 1 - 4096 * 11008 / (4 * 4096**2 + 3 * 4096 * 11008))]
)
def test_full_recompute_repeats_forward_up_to_the_last_tensor_that_backward_needs(stack: str, share: float) -> None:
    """Our trainer stops before the down projection: of h (4 h + 3 f) weights a token meets, h f; attention apart."""
    workload = Workload(seq_len=2048, global_batch=1)
    found = STACKS[stack]
    time = compute(workload=workload, stack=found).part_time(layer(find_model("llama2-7b"), workload, stack=found))
    attention = 4.0 * 32 * 128 * 2048**2 / 2
    gemms = time.forward_flops.item() - attention
    assert time.full_flops.item() - attention == pytest.approx(share * gemms, rel=1e-9)
    assert 0 < time.full_s.item() <= time.forward_s.item()


def test_the_residual_behind_the_last_tensor_is_not_added_again() -> None:
    workload = Workload(seq_len=2048, global_batch=1)
    operators = layer(find_model("llama2-7b"), workload)
    stopping, through = (
        compute(workload=workload, stack=replace(TITAN, recompute_to_last_saved=stops)).part_time(operators)
        for stops in (True, False)
    )
    assert stopping.full_s.item() < through.full_s.item()


def test_backward_of_attention_has_three_products_of_queries_and_two_of_values() -> None:
    """MLA's widths differ: 192 for queries and keys, 128 for values (DeepSeek-V3, arXiv:2412.19437, section 4.2)."""
    workload = Workload(seq_len=2048, global_batch=1)
    (core,) = (op for op in layer(find_model("deepseek-v3"), workload) if op.name == "attention")
    time = compute(workload=workload).part_time((core,))
    ratio = (3 * 192 + 2 * 128) / (192 + 128)
    assert time.backward_flops.item() == pytest.approx(ratio * time.forward_flops.item(), rel=1e-12)


def test_selective_recompute_repeats_the_score_products_of_unfused_attention() -> None:
    """Korthikanti 2022, section 5: the scores and their product with the values, 4 b s^2 h."""
    workload = Workload(seq_len=2048, global_batch=1, fused_attention=False, precision="fp16", dropout=True)
    megatron = STACKS["megatron"]
    time = compute(workload=workload, stack=megatron).part_time(
        layer(find_model("gpt3-175b"), workload, stack=megatron)
    )
    assert time.selective_flops.item() == pytest.approx(4.0 * 2048**2 * 12288, rel=1e-12)
    assert 0 < time.selective_s.item() < time.full_s.item()


def test_selective_recompute_of_fused_attention_repeats_no_product() -> None:
    workload = Workload(seq_len=2048, global_batch=1)
    time = compute(workload=workload).part_time(layer(find_model("llama2-7b"), workload))
    assert time.selective_flops.item() == 0
    assert time.selective_s.item() > 0


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=8, sp=True), Layout(cp=2, cp_kind="ring", micro_batch=2)])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_no_pass_beats_the_peak(cluster: str, layout: Layout) -> None:
    workload = Workload(seq_len=4096, global_batch=2, precision=PRECISION.get(cluster, "bf16"))
    time = compute(cluster, workload=workload).part_time(layer(find_model("llama2-7b"), workload, layout))
    peak = device(cluster).peak_flops(workload.precision)
    assert time.forward_s.item() > time.forward_flops.item() / peak
    assert (time.input_grad_s + time.weight_grad_s).item() > time.backward_flops.item() / peak


def test_weight_gradients_add_up_inside_the_gemm_or_in_a_pass_of_their_own() -> None:
    """Read the gradient in bf16, read and write the accumulated one in fp32: 10 bytes a weight."""
    workload = Workload(seq_len=4096, global_batch=1)
    operators = layer(find_model("llama2-7b"), workload)
    apart, fused = (
        compute(workload=workload, stack=replace(TITAN, fused_accumulation=fused)).part_time(operators).weight_grad_s
        for fused in (False, True)
    )
    weights, found = 4 * 4096**2 + 3 * 4096 * 11008, calibration_of("910b2")
    streamed = 10.0 * weights / (device("atlas-800t-a2").memory_bandwidth_bytes_per_s * found.vector_efficiency)
    kernels = sum(len(op.gemms) for op in operators)
    assert (apart - fused).item() == pytest.approx(streamed + kernels * found.vector_launch_s, rel=1e-9)


def test_the_optimizer_streams_every_byte_of_its_state_once_each_way() -> None:
    """AdamW: gradient 4, main weight and moments 12 read and 12 written, bf16 copy 2: 30 bytes a parameter."""
    model, n = compute(), np.array([1e9])
    reached = device("atlas-800t-a2").memory_bandwidth_bytes_per_s * model.calibration.optimizer_efficiency
    assert model.optimizer_s(n).item() == pytest.approx(30e9 / reached)


def test_in_single_precision_gradients_have_four_bytes_whatever_the_stack_reduces_in() -> None:
    """Gradient 4, weight and moments 12 read and written; bf16 gradients exist in mixed precision only."""
    workload, half = Workload(seq_len=1, global_batch=1, precision="fp32"), STACKS["megatron-deepspeed"]
    model = compute(workload=workload, stack=half)
    reached = device("atlas-800t-a2").memory_bandwidth_bytes_per_s * model.calibration.optimizer_efficiency
    assert model.optimizer_s(np.array([1e9])).item() == pytest.approx(28e9 / reached)


BETTER = {
    "gemm_efficiency": 1.1,
    "gemm_half_k": 0.5,
    "gemm_launch_s": 0.5,
    "vector_efficiency": 1.2,
    "vector_launch_s": 0.5,
    "attention_forward_efficiency": 1.2,
    "attention_backward_efficiency": 1.2,
    "attention_half_seq": 0.5,
    "optimizer_efficiency": 1.2,
}


@pytest.mark.parametrize("name", BETTER)
def test_a_better_constant_makes_compute_faster(name: str) -> None:
    """Each constant is used, in the direction that its name says."""
    workload = Workload(seq_len=4096, global_batch=1)
    before = calibration_of("910b2")
    after = replace(before, **{name: getattr(before, name) * BETTER[name]})

    def seconds(calibration: Calibration) -> float:
        model = compute(workload=workload, calibration=calibration)
        time = model.part_time(layer(find_model("llama2-7b"), workload))
        return float(
            (time.forward_s + time.input_grad_s + time.weight_grad_s + model.optimizer_s(np.array([1e9]))).item()
        )

    assert seconds(after) < seconds(before)


def test_every_constant_of_compute_is_tried_above() -> None:
    elsewhere = {"dispatch_s", "overlap_slowdown", "softmax_statistics_bytes", "fragmentation", "step_overhead_s"}
    others = {"name", "provenance", "caveat", "time_sigma", "memory_sigma"}
    assert {field.name for field in fields(Calibration)} == set(BETTER) | elsewhere | others


def test_every_shipped_cluster_can_time_a_gemm() -> None:
    for cluster in list_clusters():
        found = cluster.device
        workload = Workload(seq_len=1, global_batch=1, precision=found.default_precision)
        assert gemm(compute(spec=found, workload=workload), 512, 512, 512) > 0
