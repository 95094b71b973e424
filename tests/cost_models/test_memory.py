"""Memory against the ZeRO paper's table, against an account rank by rank, and by laws over random valid layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, reduce
from itertools import pairwise, product
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
from cost_models.rules import first_violations
from cost_models.schedules import SCHEDULES, schedule_actions, stage_rank
from cost_models.setting import Setting
from cost_models.stack import STACKS, TITAN, Stack
from cost_models.stage_activations import boundary_bytes
from cost_models.stage_memory import StageMemory
from cost_models.stage_parts import ModelParts
from cost_models.workload import Workload

MEGATRON = STACKS["megatron"]
STATES = ("weights", "gradients", "main_weights", "optimizer")


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
    states = sum(parts[name].item() for name in STATES)
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
    found = [parts[name].item() / params for name in STATES]
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
    """Parameters, peak of saved activations, and whether it holds the head, of each pipeline rank.

    From the gradient of its inputs to that of its weights a virtual stage keeps what its products read and are given.
    """
    model, pp, name = setting.model, layout.pp, layout.schedule
    p = of_parts(model, layout)
    table = setting.operator_table(Layouts.of([layout]))
    dense, moe = saved(table.dense_layer()), saved(table.moe_layer())
    counts = layout.stage_layers(model.n_layers)
    last = len(counts) - 1
    params, kept, waits = np.zeros(pp), np.zeros(len(counts)), np.zeros(len(counts))
    parts = ModelParts(setting, Layouts.of([layout]))
    deferred = [
        parts.backward("none", sparse=sparse).deferred.item() for sparse in ((False, True) if moe else (False,))
    ]
    for stage, count in enumerate(counts):
        n_dense = min(max(model.dense_layers - sum(counts[:stage]), 0), count)
        own = n_dense * p.dense_layer.item() + (count - n_dense) * (p.moe_layer + p.experts).item()
        own += (stage == 0) * p.embedding.item() + (stage == last) * p.head.item()
        params[stage_rank(name, pp, stage)] += own
        kept[stage] = n_dense * dense + (count - n_dense) * moe
        kept[stage] += (stage == 0) * saved(table.embedding()) + (stage == last) * saved(table.head())
        waits[stage] = n_dense * deferred[0] + (count - n_dense) * deferred[-1]
        waits[stage] += (stage == last) * saved(table.head()) * (not setting.stack.loss_chunk_tokens)
    peaks = []
    for actions in schedule_actions(name, pp, layout.vpp, layout.accumulation):
        alive = peak = 0.0
        for action in actions:
            alive += kept[action.stage] * (action.kind == "F")
            peak = max(peak, alive) if action.kind in {"F", "I"} else peak
            alive -= kept[action.stage] * (action.kind in {"B", "I"})
            alive += waits[action.stage] * ((action.kind == "I") - 1 * (action.kind == "W"))
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
    told = []
    for stage in MemoryModel(setting, Layouts.of([layout])).stages:
        if stage.stage.exists.item():
            kept = stage.kept
            activations = (kept.alive(kept.chunks, kept.waiting).item(), kept.alive(*kept.late).item())
            told.append(18 * stage.states.whole_parameters.item() + max(activations))
    every = [18 * params + activations for params, activations, _ in by_rank(setting, layout)]
    # Chunks of one rank count as equal: dense beside expert layers (0.6 %), token ids of a first chunk (0.003 %).
    mixed = layout.vpp > 1 and 0 < model.dense_layers < model.n_layers
    assert max(told) == pytest.approx(max(every), rel=0.01 if mixed else 1e-4 if layout.vpp > 1 else 1e-9)


@pytest.mark.parametrize(("model", "layout"), RANKED, ids=lambda value: value.name)
def test_the_told_stages_hold_the_parameters_of_their_ranks(model: ModelSpec, layout: Layout) -> None:
    setting = setting_of(model, layout.pp, batch=layout.accumulation, seq_len=512)
    every, stages = by_rank(setting, layout), telling_stages(model, Layouts.of([layout]))
    for stage, parts in zip(stages, estimate(setting, layout).stages, strict=True):
        if stage.exists.item():
            assert np.asarray(parts["weights"]).item() == pytest.approx(2 * every[int(stage.rank.item())][0], rel=1e-12)
    assert sum(int(np.asarray(stage.count).item()) for stage in stages) == layout.pp


# --- laws over random valid layouts ---


def random_layouts(setting: Setting, seed: int, tried: int = 20_000) -> Layouts:
    """Valid layouts among many drawn at random."""
    rng = np.random.default_rng(seed)

    def some(*values: int) -> np.ndarray:
        return rng.choice(np.array(values), tried)

    tp, cp, pp = some(1, 2, 4, 8), some(1, 1, 1, 2, 4), some(1, 2, 4, 8)
    dp = np.maximum(setting.n_devices // (tp * cp * pp), 1)
    micro = some(1, 2, 4)
    vpp = some(1, 1, 2, 4)
    columns: dict[str, Any] = {
        "tp": tp,
        "sp": np.where(tp > 1, some(0, 1, 1), 0),
        "cp": cp,
        "cp_kind": np.where(cp > 1, rng.integers(1, len(CP_KINDS), tried), 0),
        "ep": some(1, 2, 4, 8) if setting.model.moe else np.ones_like(tp),
        "pp": pp,
        "vpp": vpp,
        "dp": dp,
        "dp_shard": some(1, 2, 4, 8, 16),
        "zero": some(0, 1, 2, 3),
        "micro_batch": micro,
        "accumulation": np.maximum(setting.workload.global_batch // (micro * dp), 1),
        "schedule": np.where(pp > 1, rng.integers(1, len(SCHEDULES), tried), 0),
        "recompute": rng.integers(0, len(RECOMPUTES), tried),
        "recompute_layers": some(0, 0, 1, 2),
        "reduce_gradients": some(0, 1),
        "swap_optimizer": some(0, 1),
        "activation_offload": some(0, 1),
        "placement": some(0, 1),
        "short_first": some(0, 0, 1),
        "short_last": some(0, 0, 1),
    }
    columns["dp_shard"] = np.where(columns["zero"] == 0, 1, columns["dp_shard"])
    drawn = Layouts(**columns)
    return drawn.take(np.flatnonzero(first_violations(setting, drawn) < 0))


@cache
def setting_number(index: int) -> Setting:
    models = ("tiny", "llama2-7b", "qwen3-8b", "gpt2-1.5b", "mixtral-8x7b", "deepseek-v2-lite", moe_model(16, 3))
    clusters = ("atlas-800t-a2", "dgx-h100")
    choices = list(product(models, clusters, ("titan", "megatron", "megatron-deepspeed"), ("bf16", "fp32")))
    model, cluster, stack, precision = choices[index % len(choices)]
    return setting_of(model, 32, cluster=cluster, stack=STACKS[stack], batch=128, precision=precision)


@lru_cache(maxsize=32)
def drawn(number: int, seed: int) -> tuple[Setting, Layouts]:
    setting = setting_number(number)
    return setting, random_layouts(setting, seed)


def law(test: Callable[[int, int], None]) -> Callable[[], None]:
    """A law holds for the layouts of each drawn number of a setting and seed."""
    return settings(max_examples=12, deadline=None)(given(number=st.integers(0, 83), seed=st.integers(0, 999))(test))


def change(layouts: Layouts, **columns: Any) -> Layouts:  # noqa: ANN401 - columns or numbers
    """The layouts with other columns; numbers stand for all rows."""
    return replace(layouts, **{name: np.broadcast_to(value, layouts.shape) for name, value in columns.items()})


def only(layouts: Layouts, rows: np.ndarray) -> Layouts:
    return layouts.take(np.flatnonzero(rows))


def of(setting: Setting, layouts: Layouts) -> MemoryEstimate:
    return MemoryModel(setting, layouts).estimate()


def peaks(setting: Setting, layouts: Layouts) -> np.ndarray:
    return of(setting, layouts).peak_bytes


def never_more(fewer: np.ndarray, more: np.ndarray) -> None:
    """Up to rounding, and of something."""
    assert np.all(fewer <= more * (1 + 1e-12))


def test_draws_reach_every_choice() -> None:
    """Without this a law could hold because nothing was drawn."""
    found = [random_layouts(setting_number(index), 1) for index in range(0, 84, 6)]
    for name, most in (("tp", 8), ("cp_kind", 3), ("ep", 8), ("pp", 8), ("zero", 3), ("schedule", 5), ("recompute", 2)):
        seen = set(np.concatenate([getattr(layouts, name) for layouts in found]).tolist())
        assert most in seen, (name, seen)
    assert min(layouts.size for layouts in found) > 50


@law
def test_categories_sum_to_the_peak(number: int, seed: int) -> None:
    memory = of(*drawn(number, seed))
    parts = memory.by_category()
    assert tuple(parts) == CATEGORIES
    np.testing.assert_allclose(sum(parts.values()), memory.peak_bytes, rtol=1e-12)
    tensors = sum(value for name, value in parts.items() if name not in {"communication", "reserve"})
    np.testing.assert_allclose(tensors, memory.allocated_bytes, rtol=1e-12)
    assert all(np.all(value >= 0) for value in parts.values())


@law
def test_no_told_stage_of_a_layout_is_fuller_than_its_worst(number: int, seed: int) -> None:
    setting, layouts = drawn(number, seed)
    memory = of(setting, layouts)
    for stage, parts in zip(telling_stages(setting.model, layouts), memory.stages, strict=True):
        total = sum(np.broadcast_to(parts[name], layouts.shape) for name in CATEGORIES)
        assert np.all(~stage.exists | (total <= memory.peak_bytes * (1 + 1e-12)))


@law
def test_more_shards_never_take_more_memory_for_model_states(number: int, seed: int) -> None:
    """Of each category in mixed precision. In fp32 the first split adds a shard of weights beside the gathered ones."""
    setting, layouts = drawn(number, seed)
    layouts = only(layouts, (layouts.zero > 0) & (layouts.dp % (2 * layouts.dp_shard) == 0))
    wide, mixed = change(layouts, dp_shard=2 * layouts.dp_shard), setting.workload.precision != "fp32"
    fewer, more = _states(setting, wide), _states(setting, layouts)
    for name in STATES if mixed else ("weights", "gradients", "optimizer"):
        never_more(fewer[name], more[name])


def _first_stage(setting: Setting, layouts: Layouts) -> StageMemory:
    """Where every layout has it; the other stages differ in how many of the same layers they hold."""
    return MemoryModel(setting, layouts).stages[0]


def _states(setting: Setting, layouts: Layouts) -> dict[str, np.ndarray]:
    """Bytes of model states, of weights and gradients what lasts through the step and what is there after it."""
    stage = _first_stage(setting, layouts)
    states = stage.states
    found = {
        "weights": states.lasting_weights,
        "gradients": states.lasting_gradients + stage.update_bytes + stage.pipeline_buffers - states.swap_slices,
        "main_weights": states.main_weights,
        "optimizer": states.optimizer,
    }
    return {name: np.broadcast_to(value, layouts.shape) for name, value in found.items()}


def _activations(setting: Setting, layouts: Layouts) -> np.ndarray:
    kept = _first_stage(setting, layouts).kept
    return np.broadcast_to(kept.on_device(kept.chunks, kept.waiting), layouts.shape)


@law
def test_each_stage_of_zero_takes_no_more_than_the_one_before(number: int, seed: int) -> None:
    """All dp ranks as one shard group, for with replicas beside shards one more communicator takes its buffer.

    Left out: in fp32, where no low-precision copy goes, moments that are swapped out (ZeRO-1 then only adds a shard of
    the weights) and experts that no rank shares (ZeRO-3 gathers them beside what it holds anyway).
    """
    setting, layouts = drawn(number, seed)
    shared = layouts.tp * layouts.cp * layouts.dp > layouts.ep
    gains = (setting.workload.precision != "fp32") | ((layouts.swap_optimizer == 0) & shared)
    layouts = only(layouts, (layouts.zero == 3) & (layouts.dp * layouts.cp > 1) & gains)
    layouts = change(layouts, dp_shard=layouts.dp)
    ladder = [peaks(setting, change(layouts, zero=zero)) for zero in (3, 2, 1)]
    ladder.append(peaks(setting, change(layouts, zero=0, dp_shard=1)))
    # A unit is gathered beside its shard, and FSDP copies it to reduce it, which a rank of few units may not save
    # elsewhere. Where weight gradients come late it has those of a virtual stage at once.
    stages = MemoryModel(setting, layouts).stages
    units = [(*stage.states.top_layer, *stage.states.ends) for stage in stages]
    largest = reduce(np.maximum, (np.broadcast_to(unit, layouts.shape) for stage in units for unit in stage))
    copies = (20.0 if setting.stack.fsdp else 2.0) * largest
    late = np.isin(layouts.schedule, (SCHEDULES.index("zero-bubble"), SCHEDULES.index("zb-v"))) & setting.stack.fsdp
    copies = copies + 10.0 * late * reduce(np.maximum, (stage.states.whole_parameters for stage in stages))
    copies = copies * (1 + setting.calibration.fragmentation)
    for fewer, more in pairwise(ladder):
        never_more(fewer, more + copies)


@law
def test_more_tensor_parallelism_never_keeps_more_weights(number: int, seed: int) -> None:
    setting, layouts = drawn(number, seed)
    layouts = only(layouts, (layouts.tp > 1) & (layouts.ep == 1))
    half = change(layouts, tp=layouts.tp // 2, sp=np.where(layouts.tp > 2, layouts.sp, 0))
    fewer, more = _states(setting, layouts), _states(setting, half)
    for name in STATES:
        never_more(fewer[name], more[name])


@law
def test_recomputing_more_never_keeps_more_activations(number: int, seed: int) -> None:
    """Of the category alone: the working set of a recomputed layer counts as transient."""
    setting, layouts = drawn(number, seed)
    layouts = change(layouts, recompute_layers=0, swap_optimizer=0)
    none, selective, full = (
        _activations(setting, change(layouts, recompute=RECOMPUTES.index(name)))
        for name in ("none", "selective", "full")
    )
    never_more(selective, none)
    never_more(full, selective)


@law
def test_each_further_recomputed_layer_keeps_no_more_activations(number: int, seed: int) -> None:
    setting, layouts = drawn(number, seed)
    slots = setting.model.n_layers + layouts.short_first + layouts.short_last
    layouts = only(layouts, slots // (layouts.pp * layouts.vpp) > 3)
    layouts = change(layouts, recompute=RECOMPUTES.index("full"), swap_optimizer=0)
    one, two, every = (_activations(setting, change(layouts, recompute_layers=count)) for count in (1, 2, 0))
    never_more(two, one)
    never_more(every, two)
    never_more(*(peaks(setting, change(layouts, recompute_layers=count)) for count in (2, 1)))


@law
def test_selective_recompute_never_takes_more_in_all(number: int, seed: int) -> None:
    """What one layer redoes is no more than what each layer in flight no longer keeps."""
    setting, layouts = drawn(number, seed)
    layouts = change(layouts, recompute_layers=0, activation_offload=0)
    none, selective = (
        peaks(setting, change(layouts, recompute=RECOMPUTES.index(name))) for name in ("none", "selective")
    )
    never_more(selective, none)


@law
def test_swapping_the_optimizer_never_takes_more_device_memory(number: int, seed: int) -> None:
    setting, layouts = drawn(number, seed)
    kept, swapped = (of(setting, change(layouts, swap_optimizer=swap)) for swap in (0, 1))
    never_more(swapped.peak_bytes, kept.peak_bytes)
    assert np.all(swapped.host_bytes > kept.host_bytes)


@law
def test_offloading_activations_never_takes_more_device_memory(number: int, seed: int) -> None:
    setting, layouts = drawn(number, seed)
    kept, offloaded = (of(setting, change(layouts, activation_offload=offload)) for offload in (0, 1))
    # But for the input of a virtual stage, which the pipeline holds on the device beside the copy that comes back; of
    # a virtual stage that is recomputed in part the model counts layers by their mean.
    hidden = np.where(layouts.recompute_layers > 0, 6.0, 1.1) * boundary_bytes(setting, layouts)
    never_more(offloaded.peak_bytes, kept.peak_bytes + hidden * (1 + setting.calibration.fragmentation))
    assert np.all(offloaded.host_bytes >= kept.host_bytes)


@law
def test_a_larger_micro_batch_takes_more_memory(number: int, seed: int) -> None:
    setting, layouts = drawn(number, seed)
    assert np.all(peaks(setting, change(layouts, micro_batch=2 * layouts.micro_batch)) >= peaks(setting, layouts))


@law
def test_columns_that_broadcast_give_the_same_memory_as_rows(number: int, seed: int) -> None:
    """Rows x ZeRO x recomputation, as the search lays them out, against one layout at a time."""
    setting, layouts = drawn(number, seed)
    rows = layouts.take(np.arange(min(layouts.size, 5)))
    block = {name: getattr(rows, name).reshape(-1, 1, 1) for name in Layouts.__dataclass_fields__}
    block["zero"], block["dp_shard"] = np.array([0, 2, 3]).reshape(1, -1, 1), np.array([1, 1, 1]).reshape(1, -1, 1)
    block["recompute"] = np.arange(3).reshape(1, 1, -1)
    wide = Layouts(**block)
    together = of(setting, wide)
    for index in range(wide.size):
        alone = estimate(setting, wide.one(index))
        assert np.broadcast_to(together.peak_bytes, wide.shape).flat[index] == alone.peak_bytes.item()
        assert np.broadcast_to(together.host_bytes, wide.shape).flat[index] == np.asarray(alone.host_bytes).item()


@law
def test_bounds_are_on_both_sides_of_the_fullest_moment(number: int, seed: int) -> None:
    setting, layouts = drawn(number, seed)
    for stage in MemoryModel(setting, layouts).stages:
        there = np.broadcast_to(stage.stage.exists, layouts.shape)
        columns = (stage.bounds.least, stage.highest, stage.bounds.most)
        least, highest, most = (np.broadcast_to(column, layouts.shape)[there] for column in columns)
        assert np.all(least <= highest * (1 + 1e-9) + 1)
        assert np.all(highest <= most * (1 + 1e-9) + 1)


@law
def test_what_fits_is_what_stays_below_the_limit(number: int, seed: int) -> None:
    """The search decides without forming the peak; it must decide alike, for any limit."""
    setting, layouts = drawn(number, seed)
    model = MemoryModel(setting, layouts)
    memory = model.estimate()
    np.testing.assert_array_equal(model.peak_bytes(), memory.peak_bytes)
    for share in (0.1, 0.5, 0.9):
        limit, host = np.quantile(memory.peak_bytes, share) + 0.5, np.quantile(memory.host_bytes, share) + 0.5
        clear = np.abs(memory.peak_bytes / limit - 1) > 1e-9
        assert np.array_equal(model.fits(limit)[clear], memory.peak_bytes[clear] <= limit)
        assert np.array_equal(np.broadcast_to(model.fits_host(host), layouts.shape), memory.host_bytes <= host)


def test_host_memory_counts_no_rank_that_a_layout_does_not_have() -> None:
    """Two short ranks of 7 and 7 layers have no middle one of 8, which would hold more than either."""
    model = replace(dense_16(), n_layers=14, vocab_size=64)
    setting = setting_of(model, 2, batch=8, seq_len=512)
    layout = Layout(pp=2, schedule="1f1b", accumulation=8, short_first=1, short_last=1, swap_optimizer=True)
    fullest = max(params for params, _, _ in by_rank(setting, layout))
    assert np.asarray(estimate(setting, layout).host_bytes).item() == pytest.approx(12 * fullest)
    offloading = replace(layout, swap_optimizer=False, activation_offload=True)
    memory, table = estimate(setting, offloading), setting.operator_table(Layouts.of([offloading]))
    most = 2 * 7 * saved(table.dense_layer())
    assert np.asarray(memory.host_bytes).item() < most + 2 * saved(table.embedding())


def test_an_interleaved_pipeline_keeps_one_set_of_logits() -> None:
    """Its last virtual stage goes from forward to backward at once, so vpp does not multiply the logits."""
    model = replace(dense_16(), vocab_size=256_000)
    setting = setting_of(model, 4, stack=MEGATRON, batch=8, seq_len=2048)
    one, two = (
        estimate(setting, Layout(pp=4, schedule=schedule, vpp=vpp, accumulation=8)).stages[-1]["activations"].item()
        for schedule, vpp in (("1f1b", 1), ("interleaved", 2))
    )
    logits = 2048 * 256_000 * 4
    assert logits < one < 1.2 * logits
    assert logits < two < 1.2 * logits
