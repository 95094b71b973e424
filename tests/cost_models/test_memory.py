"""Memory against the ZeRO paper's table, against an account rank by rank, and by laws over random valid layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster, find_model
from cost_models.layout import CP_KINDS, RECOMPUTES, REDUCTIONS, Layout, Layouts
from cost_models.memory import CATEGORIES, MemoryEstimate, MemoryModel
from cost_models.model import ModelSpec, MoeSpec
from cost_models.operators import Operator, saved_bytes
from cost_models.parameters import PartParameters, telling_stages
from cost_models.rules import GENERAL_RULES, first_violations
from cost_models.schedules import SCHEDULES, schedule_actions, stage_rank
from cost_models.setting import Setting
from cost_models.stack import STACKS, TITAN, Stack
from cost_models.workload import Workload

MEGATRON = STACKS["megatron"]


def setting_of(
    model: ModelSpec | str,
    n_devices: int,
    *,
    cluster: str = "atlas-800t-a2",
    stack: Stack = TITAN,
    batch: int = 32,
    seq_len: int = 1024,
    precision: str = "bf16",
) -> Setting:
    found = find_cluster(cluster)
    return Setting(
        model=find_model(model) if isinstance(model, str) else model,
        workload=Workload(seq_len=seq_len, global_batch=batch, precision=precision),
        cluster=found,
        stack=stack,
        calibration=calibration_of(found.device.name),
        n_devices=n_devices,
    )


def estimate(setting: Setting, *layouts: Layout) -> MemoryEstimate:
    return MemoryModel(setting, Layouts.of(layouts)).estimate()


# --- Rajbhandari et al. 2020, arXiv:1910.02054, section 3 and figure 1 ---

FP16_GRADIENTS = Stack(name="paper", gradient_bytes=2)


def model_states_per_parameter(zero: int, ranks: int) -> float:
    setting = setting_of("llama2-7b", ranks, stack=FP16_GRADIENTS, batch=ranks, precision="fp16")
    parts = estimate(setting, Layout(dp=ranks, dp_shard=ranks if zero else 1, zero=zero)).by_category()
    states = sum(parts[name].item() for name in ("weights", "gradients", "main_weights", "optimizer"))
    return float(states) / setting.model.total_params


@pytest.mark.parametrize("n", [2, 8, 64, 1024])
def test_model_states_are_the_bytes_a_parameter_of_the_zero_paper(n: int) -> None:
    """16, 4 + 12/N, 2 + 14/N; stage 3 is 16/N less the 2/N of an fp16 shard, which FSDP2 casts anew on each gather."""
    assert model_states_per_parameter(0, n) == pytest.approx(16)
    assert model_states_per_parameter(1, n) == pytest.approx(4 + 12 / n)
    assert model_states_per_parameter(2, n) == pytest.approx(2 + 14 / n)
    assert model_states_per_parameter(3, n) == pytest.approx(16 / n - 2 / n)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6)])
def test_the_paper_s_example_of_7_5_billion_parameters_on_64_devices(zero: int, gigabytes: float) -> None:
    assert 7.5 * model_states_per_parameter(zero, 64) == pytest.approx(gigabytes, abs=0.05)


def test_the_paper_s_example_at_stage_3_has_its_half_precision_shard_besides() -> None:
    assert 7.5 * (model_states_per_parameter(3, 64) + 2 / 64) == pytest.approx(1.9, abs=0.05)


def test_gradients_stay_whole_until_the_last_micro_batch_whatever_zero_says() -> None:
    setting = setting_of("llama2-7b", 8, batch=64)
    last, every = (
        estimate(setting, Layout(dp=8, dp_shard=8, zero=2, accumulation=8, reduce_gradients=when)).by_category()
        for when in REDUCTIONS
    )
    assert last["gradients"] == pytest.approx(8 * every["gradients"])
    assert last["gradients"] == pytest.approx(4 * setting.model.total_params)


def test_single_precision_keeps_no_main_weights_without_sharding() -> None:
    setting = setting_of("llama2-7b", 8, batch=8, precision="fp32")
    parts = estimate(setting, Layout(dp=8)).by_category()
    params = setting.model.total_params
    found = [parts[name].item() / params for name in ("weights", "gradients", "main_weights", "optimizer")]
    assert found == pytest.approx([4, 4, 0, 8])


# --- parameters ---


def of_parts(model: ModelSpec, layout: Layout) -> PartParameters:
    return PartParameters.of(model, Layouts.of([layout]))


def on_every_tp_rank(model: ModelSpec) -> tuple[float, float, float]:
    """Elements of a layer, the embedding and the head that tensor parallelism does not cut, by hand."""
    layer = 2 * model.norm_params + model.hidden_dim * model.attention_out_bias + 2 * model.head_dim * model.qk_norm
    layer += model.hidden_dim * model.mlp_bias * (model.moe is None)
    if model.mla:
        latent = model.mla.q_lora_rank + model.mla.kv_lora_rank
        layer += model.hidden_dim * (latent + model.mla.qk_rope_head_dim) + latent
    embedding = model.positions * model.hidden_dim + model.norm_params * model.embedding_norm
    return layer, embedding, model.norm_params


NAMES = ("llama3.1-8b", "gpt3-175b", "bloom-176b", "qwen3-8b", "qwen2.5-0.5b", "mixtral-8x7b", "deepseek-v3")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_over_tensor_parallel_ranks_are_those_of_the_model(name: str, tp: int) -> None:
    """Replicated parts count once; GPT-3's odd vocabulary is padded by a row at tp 2."""
    model, copies = find_model(name), tp - 1
    p = of_parts(model, Layout(tp=tp))
    layer, embedding, head = on_every_tp_rank(model)
    routers = model.router_params
    total = model.dense_layers * (tp * p.dense_layer - copies * layer)
    total = total + model.moe_layers * (tp * (p.moe_layer + p.experts) - copies * (layer + routers))
    total = total + tp * (p.embedding + p.head) - copies * (embedding + head)
    padding = (-model.vocab_size % tp) * model.hidden_dim * (1 if model.tied_embeddings else 2)
    assert total.item() == model.total_params + padding


@pytest.mark.parametrize("layout", [Layout(dp=8, ep=8), Layout(tp=2, sp=True, ep=2), Layout(tp=2, sp=True, dp=2, ep=4)])
def test_experts_over_expert_parallel_ranks_are_those_of_a_layer(layout: Layout) -> None:
    """With ep each rank holds whole experts, and tp cuts them no further."""
    model = find_model("mixtral-8x7b")
    assert of_parts(model, layout).experts.item() * layout.ep == 8 * model.expert_params


def test_a_tied_embedding_is_held_twice_by_a_pipeline_and_once_without() -> None:
    model = find_model("qwen2.5-0.5b")
    vocab = model.vocab_size * model.hidden_dim
    alone, split = (of_parts(model, Layout(pp=pp)).head.item() for pp in (1, 2))
    assert (alone, split) == (model.hidden_dim, vocab + model.hidden_dim)


# --- rank by rank: an account over the schedule's own list of actions ---


def moe_model(n_layers: int, dense_layers: int) -> ModelSpec:
    moe = MoeSpec(experts=16, top_k=2, ffn_dim=512, dense_layers=dense_layers)
    return replace(find_model("tiny"), n_layers=n_layers, hidden_dim=256, ffn_dim=1024, moe=moe, vocab_size=32000)


def saved(operators: tuple[Operator, ...]) -> float:
    return float(np.asarray(saved_bytes(operators)).item())


def by_rank(setting: Setting, layout: Layout) -> list[tuple[float, float, bool]]:
    """Parameters, peak of saved activations, and whether it holds the head, of each pipeline rank."""
    model, pp, name = setting.model, layout.pp, layout.schedule
    p = of_parts(model, layout)
    table = setting.operator_table(Layouts.of([layout]))
    dense, moe = saved(table.dense_layer()), saved(table.moe_layer())
    counts = layout.stage_layers(model.n_layers)
    last = len(counts) - 1
    params, kept = np.zeros(pp), np.zeros(len(counts))
    for stage, count in enumerate(counts):
        n_dense = min(max(model.dense_layers - sum(counts[:stage]), 0), count)
        own = n_dense * p.dense_layer.item() + (count - n_dense) * (p.moe_layer + p.experts).item()
        own += (stage == 0) * p.embedding.item() + (stage == last) * p.head.item()
        params[stage_rank(name, pp, stage)] += own
        kept[stage] = n_dense * dense + (count - n_dense) * moe
        kept[stage] += (stage == 0) * saved(table.embedding()) + (stage == last) * saved(table.head())
    peaks = []
    for actions in schedule_actions(name, pp, layout.vpp, layout.accumulation):
        alive = peak = 0.0
        for action in actions:
            alive += kept[action.stage] * (action.kind == "F")
            peak = max(peak, alive)
            alive -= kept[action.stage] * (action.kind in {"B", "W"})
        peaks.append(peak)
    head_rank = stage_rank(name, pp, last)
    return [(own, peak, rank == head_rank) for rank, (own, peak) in enumerate(zip(params, peaks, strict=True))]


def dense_16() -> ModelSpec:
    return replace(find_model("tiny"), n_layers=16, hidden_dim=256, ffn_dim=1024, vocab_size=32000)


RANKED = [
    (dense_16(), Layout(accumulation=4)),
    (dense_16(), Layout(pp=2, schedule="1f1b", accumulation=8)),
    (dense_16(), Layout(pp=4, schedule="gpipe", accumulation=8)),
    (dense_16(), Layout(pp=8, schedule="1f1b", accumulation=8)),
    (dense_16(), Layout(pp=4, schedule="zero-bubble", accumulation=8)),
    (dense_16(), Layout(pp=4, schedule="zb-v", vpp=2, accumulation=8)),
    (dense_16(), Layout(pp=4, schedule="zb-v", vpp=2, accumulation=4)),
    (dense_16(), Layout(pp=4, schedule="interleaved", vpp=2, accumulation=8)),
    (dense_16(), Layout(pp=4, schedule="interleaved", vpp=4, accumulation=4)),
    (replace(dense_16(), n_layers=14), Layout(pp=4, schedule="1f1b", accumulation=8, short_first=1, short_last=1)),
    (replace(dense_16(), n_layers=7), Layout(pp=4, schedule="1f1b", accumulation=4, short_last=1)),
    (moe_model(16, 0), Layout(pp=4, schedule="1f1b", accumulation=8)),
    (moe_model(16, 1), Layout(pp=4, schedule="1f1b", accumulation=8)),
    (moe_model(8, 3), Layout(pp=4, schedule="1f1b", accumulation=8)),
    (moe_model(61, 3), Layout(pp=21, schedule="1f1b", accumulation=32, short_first=1, short_last=1)),
    (moe_model(16, 5), Layout(pp=4, schedule="zb-v", vpp=2, accumulation=8)),
    (moe_model(16, 3), Layout(pp=4, schedule="interleaved", vpp=2, accumulation=8)),
]


@pytest.mark.parametrize("stack", [TITAN, MEGATRON], ids=lambda stack: stack.name)
@pytest.mark.parametrize(("model", "layout"), RANKED, ids=lambda value: value.name)
def test_the_told_stages_include_the_fullest_rank(model: ModelSpec, layout: Layout, stack: Stack) -> None:
    """Model states (18 bytes a parameter, gradients in full precision) and saved activations, over all ranks."""
    setting = setting_of(model, layout.pp, stack=stack, batch=layout.accumulation, seq_len=512)
    memory = estimate(setting, layout)
    told = [
        sum(np.asarray(parts[name]).item() for name in ("weights", "gradients", "main_weights", "optimizer"))
        + np.asarray(parts["activations"]).item()
        for parts, stage in zip(memory.stages, telling_stages(model, Layouts.of([layout])), strict=True)
        if stage.exists.item()
    ]
    every = [18 * params + activations for params, activations, _ in by_rank(setting, layout)]
    assert max(told) == pytest.approx(max(every), rel=RANK_TOLERANCE)


RANK_TOLERANCE = 1e-9


@pytest.mark.parametrize(("model", "layout"), RANKED, ids=lambda value: value.name)
def test_the_told_stages_hold_the_parameters_of_their_ranks(model: ModelSpec, layout: Layout) -> None:
    setting = setting_of(model, layout.pp, batch=layout.accumulation, seq_len=512)
    every, stages = by_rank(setting, layout), telling_stages(model, Layouts.of([layout]))
    for stage, parts in zip(stages, estimate(setting, layout).stages, strict=True):
        if stage.exists.item():
            assert parts["weights"].item() == pytest.approx(2 * every[int(stage.rank.item())][0], rel=1e-12)
    assert sum(int(np.asarray(stage.count).item()) for stage in stages) == layout.pp
