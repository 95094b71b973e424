"""Step time by laws: parts sum to the whole, FLOPs are the model's, faster is never slower, columns are rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster, find_model
from cost_models.layout import COLUMN_NAMES, CP_KINDS, PLACEMENTS, RECOMPUTES, REDUCTIONS, Layout, Layouts
from cost_models.model import ModelSpec, MoeSpec
from cost_models.prediction import Prediction, model_flops, predict
from cost_models.rules import first_violations
from cost_models.schedules import SCHEDULES
from cost_models.setting import Setting
from cost_models.stack import STACKS, TITAN, Stack
from cost_models.step_time import StepTimeModel, TimeEstimate
from cost_models.workload import Workload


def setting_of(
    model: ModelSpec | str = "llama2-7b",
    n_devices: int = 32,
    *,
    cluster: str = "atlas-800t-a2",
    stack: Stack = TITAN,
    batch: int = 128,
    seq_len: int = 2048,
    precision: str = "bf16",
    **workload: Any,  # noqa: ANN401 - further fields of Workload
) -> Setting:
    found = find_cluster(cluster)
    return Setting(
        model=find_model(model) if isinstance(model, str) else model,
        workload=Workload(seq_len=seq_len, global_batch=batch, precision=precision, **workload),
        cluster=found,
        stack=stack,
        calibration=calibration_of(found.device.name),
        n_devices=n_devices,
    )


def dense_first() -> ModelSpec:
    """Three leading dense layers run over into the second of eight stages of two."""
    moe = MoeSpec(experts=16, top_k=2, ffn_dim=512, dense_layers=3)
    return replace(find_model("tiny"), n_layers=16, hidden_dim=512, ffn_dim=2048, moe=moe, vocab_size=32000)


@lru_cache(maxsize=128)
def setting_number(index: int) -> Setting:
    models = ("llama2-7b", "tiny", "qwen3-8b", "mixtral-8x7b", "deepseek-v2-lite", dense_first())
    clusters = ("atlas-800t-a2", "dgx-h100", "cloudmatrix384")
    choices = list(product(models, clusters, ("titan", "megatron", "megatron-deepspeed", "mindspeed-mc2")))
    model, cluster, stack = choices[index % len(choices)]
    return setting_of(model, cluster=cluster, stack=STACKS[stack])


def random_layouts(setting: Setting, seed: int, tried: int = 20_000) -> Layouts:
    """Valid layouts among many drawn at random."""
    rng = np.random.default_rng(seed)

    def some(*values: int) -> np.ndarray:
        return rng.choice(np.array(values), tried)

    tp, cp, pp = some(1, 2, 4, 8), some(1, 1, 1, 2, 4), some(1, 2, 4, 8)
    dp, micro = np.maximum(setting.n_devices // (tp * cp * pp), 1), some(1, 2, 4)
    zero = some(0, 1, 2, 3)
    columns: dict[str, Any] = {
        "tp": tp,
        "sp": np.where(tp > 1, some(0, 1, 1), 0),
        "cp": cp,
        "cp_kind": np.where(cp > 1, rng.integers(1, len(CP_KINDS), tried), 0),
        "ep": some(1, 2, 4, 8) if setting.model.moe else np.ones_like(tp),
        "pp": pp,
        "vpp": some(1, 1, 2, 4),
        "dp": dp,
        "dp_shard": np.where(zero == 0, 1, some(1, 2, 4, 8, 16)),
        "zero": zero,
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
    found = Layouts(**columns)
    return found.take(np.flatnonzero(first_violations(setting, found) < 0))


@lru_cache(maxsize=32)
def drawn(number: int, seed: int) -> tuple[Setting, Layouts]:
    setting = setting_number(number)
    return setting, random_layouts(setting, seed)


def law(test: Callable[[int, int], None]) -> Callable[[], None]:
    """A law holds for the layouts of each drawn number of a setting and seed."""
    return settings(max_examples=12, deadline=None)(given(number=st.integers(0, 71), seed=st.integers(0, 999))(test))


def change(layouts: Layouts, **columns: Any) -> Layouts:  # noqa: ANN401 - columns or numbers
    """The layouts with other columns; numbers stand for all rows."""
    return replace(layouts, **{name: np.broadcast_to(value, layouts.shape) for name, value in columns.items()})


def time_of(setting: Setting, layouts: Layouts) -> TimeEstimate:
    return StepTimeModel(setting, layouts).estimate()


def steps(setting: Setting, layouts: Layouts) -> np.ndarray:
    return np.broadcast_to(StepTimeModel(setting, layouts).step_s(), layouts.shape)


def one(setting: Setting, layout: Layout) -> Prediction:
    return predict(setting, Layouts.of([layout]))


def never_slower(fast: np.ndarray, slow: np.ndarray, layouts: Layouts, rounding: float = 1e-9) -> None:
    worse = np.flatnonzero(fast > slow * (1 + rounding))
    assert not len(worse), [(layouts.one(at).name, float(fast[at] / slow[at])) for at in worse[:3].tolist()]


# --- what the parts add up to ---


@law
def test_the_components_of_a_step_sum_to_it(number: int, seed: int) -> None:
    """ZeRO, cp, ep, offload and every schedule among them; no component is negative."""
    setting, layouts = drawn(number, seed)
    time = time_of(setting, layouts)
    parts = [time.computing_s, *time.communication_s.values(), time.bubble_s, time.free_s]
    total = sum((np.broadcast_to(part, layouts.shape) for part in parts), np.zeros(layouts.shape))
    np.testing.assert_allclose(total, np.broadcast_to(time.step_s, layouts.shape), rtol=1e-9)
    assert all(np.all(part >= 0) for part in [*parts, time.recompute_s, time.hidden_communication_s])
    assert np.all(time.recompute_s + time.optimizer_s <= time.computing_s * (1 + 1e-12))


def test_the_draws_reach_every_schedule_and_dimension() -> None:
    found = [drawn(number, 1)[1] for number in range(0, 72, 5)]
    for name in ("schedule", "cp_kind", "zero", "recompute", "reduce_gradients", "placement", "short_first"):
        seen = set(np.concatenate([getattr(layouts, name) for layouts in found]).tolist())
        assert len(seen) == {"schedule": 6, "cp_kind": 4, "zero": 4, "recompute": 3}.get(name, 2), name
    assert max(int(layouts.ep.max()) for layouts in found) == 8


@law
def test_time_alone_is_the_time_of_the_whole_estimate(number: int, seed: int) -> None:
    setting, layouts = drawn(number, seed)
    np.testing.assert_array_equal(
        steps(setting, layouts), np.broadcast_to(time_of(setting, layouts).step_s, layouts.shape)
    )


@law
def test_utilisation_stays_below_one(number: int, seed: int) -> None:
    """MFU counts useful work, HFU all work; the second is never less where attention is fused and causal."""
    setting, layouts = drawn(number, seed)
    found = predict(setting, layouts)
    assert np.all((found.mfu > 0) & (found.mfu < 1))
    assert np.all((found.hfu > 0) & (found.hfu < 1))
    assert np.all(found.hfu >= found.mfu * (1 - 1e-12))


@law
def test_without_recompute_all_ranks_compute_what_the_model_asks(number: int, seed: int) -> None:
    """Forward and twice that backward, and the scores once more in the backward of the fused kernel.

    Its five products there are three of the width of queries and keys and two of that of values. Under a window or
    ALiBi the trainer's kernel computes what the mask hides, too. With sp, for without it each tp rank makes the
    router's and the latents' products anew.
    """
    setting, layouts = drawn(number, seed)
    layouts = layouts.take(np.flatnonzero((layouts.tp == 1) | (layouts.sp == 1)))
    layouts = change(layouts, recompute=0, recompute_layers=0)
    model, work = setting.model, setting.workload
    asked = model.attended_pairs(work.seq_len)
    masked = bool(model.sliding_window) or model.position == "alibi"
    pieces = (layouts.cp > 1) & (layouts.cp_kind != CP_KINDS.index("ulysses"))
    square = work.seq_len**2 * np.where(pieces, (2 * layouts.cp + 1) / (4 * layouts.cp), 1.0)
    computed = square if masked else asked
    qk, v = model.qk_head_dim, model.v_head_dim
    more = ((qk + v) + (3 * qk + 2 * v)) * computed - 3 * (qk + v) * asked
    scores = 2.0 * model.n_layers * model.n_heads * more * work.global_batch
    total = time_of(setting, layouts).hardware_flops * setting.n_devices
    padding = -model.vocab_size % layouts.tp / model.vocab_size
    head = 6.0 * model.vocab_size * model.hidden_dim * work.tokens
    np.testing.assert_allclose(total, model_flops(setting) + scores + padding * head, rtol=1e-9)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=8, sp=True), Layout(pp=4, schedule="1f1b"), Layout(dp=4)])
def test_gpt3_with_full_recompute_computes_narayanan_s_flops(layout: Layout) -> None:
    """arXiv:2104.04473, section 3: 96 B s l h^2 (1 + s / (6 h) + V / (16 l h))."""
    s, n_layers, h, vocab, batch = 2048, 96, 12288, 51200, 16
    model = replace(find_model("gpt3-175b"), vocab_size=vocab)
    setting = setting_of(
        model, layout.devices, stack=STACKS["megatron"], batch=batch, seq_len=s, precision="fp16", fused_attention=False
    )
    layout = replace(layout, recompute="full", accumulation=batch // layout.dp)
    found = one(setting, layout).time.hardware_flops.item() * layout.devices
    assert found == pytest.approx(96 * batch * s * n_layers * h**2 * (1 + s / (6 * h) + vocab / (16 * n_layers * h)))


def test_selective_recompute_adds_one_more_attention_forward() -> None:
    """Korthikanti 2022, section 5: of 72 B s l h^2 (1 + s / (6 h) + ...) the scores once more, 4 B s^2 h a layer."""
    setting = setting_of("gpt3-175b", 8, stack=STACKS["megatron"], batch=8, precision="fp16", fused_attention=False)
    plain, selective = (
        one(setting, Layout(tp=8, sp=True, accumulation=8, recompute=recompute)).time.hardware_flops.item() * 8
        for recompute in ("none", "selective")
    )
    assert selective - plain == pytest.approx(96 * 4 * 8 * 2048**2 * 12288, rel=1e-9)


@law
def test_tokens_time_and_mfu_say_the_same(number: int, seed: int) -> None:
    setting, layouts = drawn(number, seed)
    found = predict(setting, layouts)
    np.testing.assert_allclose(
        found.tokens_per_s_per_device * found.step_time_s * setting.n_devices, setting.workload.tokens
    )
    peak = setting.cluster.device.peak_flops("bf16")
    np.testing.assert_allclose(found.mfu * peak * found.step_time_s * setting.n_devices, model_flops(setting))
    assert np.all(found.step_time_low_s < found.step_time_s)
    assert np.all(found.step_time_high_s > found.step_time_s)


# --- faster hardware, better constants, more work ---


def with_links(setting: Setting, factor: float) -> Setting:
    tiers = tuple(
        replace(tier, link_bandwidth_bytes_per_s=factor * tier.link_bandwidth_bytes_per_s)
        for tier in setting.cluster.tiers
    )
    return replace(setting, cluster=replace(setting.cluster, tiers=tiers))


def with_one_link(setting: Setting, index: int) -> Setting:
    tiers = list(setting.cluster.tiers)
    index %= len(tiers)
    tiers[index] = replace(tiers[index], link_bandwidth_bytes_per_s=2 * tiers[index].link_bandwidth_bytes_per_s)
    return replace(setting, cluster=replace(setting.cluster, tiers=tuple(tiers)))


def with_device(setting: Setting, **changes: Any) -> Setting:  # noqa: ANN401 - fields of DeviceSpec
    device = replace(setting.cluster.device, **changes)
    return replace(setting, cluster=replace(setting.cluster, device=device))


def faster_memory(setting: Setting) -> Setting:
    return with_device(setting, memory_bandwidth_bytes_per_s=2 * setting.cluster.device.memory_bandwidth_bytes_per_s)


def faster_arithmetic(setting: Setting) -> Setting:
    peaks = setting.cluster.device.peak_flops_by_precision
    return with_device(setting, peak_flops_by_precision=tuple((name, 2 * value) for name, value in peaks))


def faster_host_link(setting: Setting) -> Setting:
    return with_device(setting, host_bandwidth_bytes_per_s=2 * setting.cluster.device.host_bandwidth_bytes_per_s)


FASTER: dict[str, Callable[[Setting], Setting]] = {
    "all links": lambda setting: with_links(setting, 2.0),
    "the nearest link": lambda setting: with_one_link(setting, 0),
    "the farthest link": lambda setting: with_one_link(setting, -1),
    "memory": faster_memory,
    "arithmetic": faster_arithmetic,
    "host link": faster_host_link,
}


def never_slower_but_for_split_backwards(fast: Setting, slow: Setting, layouts: Layouts) -> None:
    """Waits for the host or a link in backward count to the input gradient, none to the weight gradient.

    The fill of a zero-bubble schedule grows with their difference, so where a wait bounds the backward and the weight
    gradient alone gets faster, that fill grows by up to 11 % of a step. All other schedules keep the law strictly.
    """
    split = np.isin(layouts.schedule, [SCHEDULES.index("zero-bubble"), SCHEDULES.index("zb-v")])
    for rows, slack in ((~split, 1e-9), (split, 0.15)):
        some = layouts.take(np.flatnonzero(rows))
        never_slower(steps(fast, some), steps(slow, some), some, slack)


@pytest.mark.parametrize("what", FASTER)
@law
def test_twice_the_speed_of_anything_never_slows_a_step(what: str, number: int, seed: int) -> None:
    setting, layouts = drawn(number, seed)
    if "link" in what and what != "host link":
        never_slower(steps(FASTER[what](setting), layouts), steps(setting, layouts), layouts)
    else:
        never_slower_but_for_split_backwards(FASTER[what](setting), setting, layouts)


@pytest.mark.parametrize("what", FASTER)
def test_twice_the_speed_of_anything_helps_where_it_is_the_bound(what: str) -> None:
    layout = Layout(
        tp=8,
        sp=True,
        dp=4,
        dp_shard=4,
        zero=3,
        accumulation=32,
        swap_optimizer=True,
        activation_offload=True,
    )
    setting = setting_of(seq_len=4096)
    columns = Layouts.of([layout])
    assert steps(FASTER[what](setting), columns).item() < steps(setting, columns).item()


BETTER = {
    "gemm_efficiency": 1.05,
    "gemm_half_k": 0.5,
    "gemm_launch_s": 0.5,
    "vector_efficiency": 1.05,
    "vector_launch_s": 0.5,
    "attention_forward_efficiency": 1.05,
    "attention_backward_efficiency": 1.05,
    "attention_half_seq": 0.5,
    "dispatch_s": 0.5,
    "overlap_slowdown": 0.5,
    "optimizer_efficiency": 1.05,
    "step_overhead_s": 0.5,
}


@pytest.mark.parametrize("name", BETTER)
@law
def test_a_better_constant_never_slows_a_step(name: str, number: int, seed: int) -> None:
    setting, layouts = drawn(number, seed)
    value = getattr(setting.calibration, name) * BETTER[name]
    better = replace(setting, calibration=replace(setting.calibration, **{name: value}))
    never_slower_but_for_split_backwards(better, setting, layouts)


@law
def test_recomputing_more_never_makes_a_step_faster(number: int, seed: int) -> None:
    """The search bisects the fewest recomputed layers that fit, which is right only if each more costs time.

    Without offload: a layer that is recomputed has less to move to the host.
    """
    setting, layouts = drawn(number, seed)
    layouts = change(layouts, recompute=RECOMPUTES.index("full"), activation_offload=0)
    slots = setting.model.n_layers + layouts.short_first + layouts.short_last
    each = slots // (layouts.pp * layouts.vpp)
    layouts = change(layouts.take(np.flatnonzero(each > 2)), recompute_layers=0)
    none = steps(setting, change(layouts, recompute=0))
    fewest, more, every = (steps(setting, change(layouts, recompute_layers=count)) for count in (1, 2, 0))
    never_slower(none, fewest, layouts)
    never_slower(fewest, more, layouts)
    never_slower(more, every, layouts)


@law
def test_no_choice_is_faster_than_the_bound_that_the_search_prunes_by(number: int, seed: int) -> None:
    """Rows without ZeRO, recompute, swap; whatever is then chosen, the step takes at least `least_step_s`."""
    setting, layouts = drawn(number, seed)
    plain = {"zero": 0, "dp_shard": 1, "recompute": 0, "recompute_layers": 0, "reduce_gradients": 0}
    bare = change(layouts, **plain, swap_optimizer=0, activation_offload=0)
    least = np.broadcast_to(StepTimeModel(setting, bare).least_step_s(), layouts.shape)
    never_slower(least, steps(setting, layouts), layouts)


@law
def test_swapping_and_offloading_never_make_a_step_faster(number: int, seed: int) -> None:
    setting, layouts = drawn(number, seed)
    for name in ("swap_optimizer", "activation_offload"):
        without, with_it = (steps(setting, change(layouts, **{name: on})) for on in (0, 1))
        never_slower(without, with_it, layouts)


@pytest.mark.parametrize(
    ("schedule", "vpp"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zb-v", 2)]
)
def test_the_bubble_of_a_micro_batch_falls_with_their_number(schedule: str, vpp: int) -> None:
    """Seconds of bubble over seconds of work; filling and draining happen once a step."""
    shares = []
    for accumulation in (4, 8, 16, 32, 64):
        setting = setting_of("llama2-7b", 4, batch=accumulation)
        layout = Layout(pp=4, vpp=vpp, schedule=schedule, accumulation=accumulation)
        shares.append(one(setting, layout).time.bubble_s.item() / accumulation)
    assert all(later < earlier for earlier, later in pairwise(shares))
    assert shares[-1] > 0


def test_without_a_pipeline_there_is_no_bubble() -> None:
    assert one(setting_of(n_devices=4), Layout(dp=4, accumulation=32)).time.bubble_s.item() == 0


def test_gpipe_s_bubble_is_h_of_m_plus_h() -> None:
    """(p - 1) / m of the work (Narayanan 2021, section 2.2), up to the p2p messages and the unequal ends."""
    model = replace(find_model("llama2-7b"), vocab_size=64, n_layers=64)
    setting = with_links(setting_of(model, 8, batch=16), 1e3)
    time = one(setting, Layout(pp=8, schedule="gpipe", accumulation=16)).time
    tail = time.optimizer_s + setting.calibration.step_overhead_s
    work = time.step_s - time.bubble_s - tail
    assert (time.bubble_s / work).item() == pytest.approx(7 / 16, rel=0.03)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_links_make_the_pipeline_s_communication_and_leave_its_bubble(schedule: str) -> None:
    layout = Layout(pp=8, schedule=schedule, accumulation=16)
    model = replace(find_model("llama2-7b"), n_layers=64)
    slow = setting_of(model, 8, batch=16)
    times = [one(setting, layout).time for setting in (slow, with_links(slow, 1e3))]
    assert times[0].bubble_s.item() == pytest.approx(times[1].bubble_s.item())
    assert times[0].communication_s["pp"].item() > 2 * times[1].communication_s["pp"].item() > 0
    assert one(setting_of(n_devices=4), Layout(dp=4, accumulation=32)).time.communication_s["pp"].item() == 0


# --- what hides ---


def ring_time(seq_len: int, stack: Stack) -> TimeEstimate:
    setting = setting_of("llama3.1-8b", 8, batch=8, seq_len=seq_len, stack=stack)
    return one(setting, Layout(cp=8, cp_kind="ring", accumulation=8)).time


def test_a_ring_hides_under_long_sequences_and_not_under_short_ones() -> None:
    """Attention grows with the square of the sequence, the exchange of keys and values with the sequence alone."""
    short, long = (ring_time(seq_len, STACKS["megatron"]) for seq_len in (2048, 131072))
    assert short.communication_s["cp"].item() > 0
    assert long.communication_s["cp"].item() == 0
    assert long.hidden_communication_s.item() > 0


def test_gradients_that_the_ring_does_not_pass_on_are_waited_for_at_its_end() -> None:
    """Our trainer sums them by a reduce-scatter of keys and values, in each layer and micro batch, and hides less."""
    passed, scattered = (ring_time(131072, stack) for stack in (STACKS["megatron"], TITAN))
    assert scattered.communication_s["cp"].item() > passed.communication_s["cp"].item() == 0
    assert scattered.hidden_communication_s.item() < passed.hidden_communication_s.item()


@law
def test_overlap_never_costs_more_than_waiting(number: int, seed: int) -> None:
    """A slowdown below one is less than what hiding saves."""
    setting, layouts = drawn(number, seed)
    assert setting.calibration.overlap_slowdown < 1
    waits = replace(
        setting.stack,
        overlaps_gradients=False,
        overlaps_parameters=False,
        prefetches_weights=False,
        tensor_overlap=0.0,
    )
    hides = replace(
        setting.stack, overlaps_gradients=True, overlaps_parameters=True, prefetches_weights=True, tensor_overlap=0.5
    )
    never_slower(*(steps(replace(setting, stack=stack), layouts) for stack in (hides, waits)), layouts)


def test_traffic_of_each_dimension_is_told_under_its_name() -> None:
    setting = setting_of("mixtral-8x7b", 64, batch=64)
    layout = Layout(tp=2, sp=True, cp=2, cp_kind="ulysses", ep=8, pp=2, dp=8, dp_shard=8, zero=3, schedule="1f1b")
    layout = replace(layout, accumulation=8)
    told = one(setting, layout).time.communication_s
    assert all(told[name].item() > 0 for name in ("tp", "cp", "ep", "dp"))
    alone = one(setting_of("mixtral-8x7b", 1, batch=64), Layout(accumulation=64)).time.communication_s
    assert all(np.asarray(value).item() == 0 for value in alone.values())


# --- columns are rows ---


@law
def test_columns_that_broadcast_give_exactly_the_times_of_rows(number: int, seed: int) -> None:
    """Rows x ZeRO x recomputation, as the search lays them out, against one layout at a time."""
    setting, layouts = drawn(number, seed)
    rows = layouts.take(np.arange(min(layouts.size, 4)))
    block = {name: getattr(rows, name).reshape(-1, 1, 1) for name in COLUMN_NAMES}
    block["zero"], block["dp_shard"] = np.array([0, 2, 3]).reshape(1, -1, 1), np.array([1, 1, 1]).reshape(1, -1, 1)
    block["recompute"] = np.arange(3).reshape(1, 1, -1)
    wide = Layouts(**block)
    together = steps(setting, wide)
    flops = np.broadcast_to(time_of(setting, wide).hardware_flops, wide.shape)
    for index in range(wide.size):
        alone = StepTimeModel(setting, Layouts.of([wide.one(index)])).estimate()
        assert together.flat[index] == np.asarray(alone.step_s).item()
        assert flops.flat[index] == np.asarray(alone.hardware_flops).item()


@st.composite
def any_layout(draw: st.DrawFn) -> Layout:
    number, few = st.integers(1, 8), st.integers(0, 3)
    return Layout(
        tp=draw(number),
        sp=draw(st.booleans()),
        cp=draw(number),
        cp_kind=draw(st.sampled_from(CP_KINDS)),
        ep=draw(number),
        pp=draw(number),
        vpp=draw(number),
        dp=draw(number),
        dp_shard=draw(number),
        zero=draw(few),
        micro_batch=draw(number),
        accumulation=draw(number),
        schedule=draw(st.sampled_from(SCHEDULES)),
        recompute=draw(st.sampled_from(RECOMPUTES)),
        recompute_layers=draw(few),
        reduce_gradients=draw(st.sampled_from(REDUCTIONS)),
        swap_optimizer=draw(st.booleans()),
        activation_offload=draw(st.booleans()),
        placement=draw(st.sampled_from(PLACEMENTS)),
        short_first=draw(few),
        short_last=draw(few),
    )


@given(layouts=st.lists(any_layout(), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_columns_hold_what_was_put_in(layouts: list[Layout]) -> None:
    columns = Layouts.of(layouts)
    count = len(layouts)
    assert (columns.shape, columns.size) == ((count,), count)
    assert [columns.one(index) for index in range(count)] == layouts
    backwards = columns.take(np.arange(count)[::-1])
    assert [backwards.one(index) for index in range(count)] == layouts[::-1]
    twice = Layouts.joined([columns, backwards])
    assert [twice.one(index) for index in range(2 * count)] == layouts + layouts[::-1]


@given(layouts=st.lists(any_layout(), min_size=1, max_size=5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_rows_are_kept_with_all_that_they_broadcast_to(layouts: list[Layout], data: st.DataObject) -> None:
    """Also none of them, and the only one."""
    columns = Layouts.of(layouts)
    block = {name: getattr(columns, name).reshape(-1, 1) for name in COLUMN_NAMES}
    block["zero"] = np.array([0, 1, 2]).reshape(1, -1)
    wide = Layouts(**block)
    rows = data.draw(st.lists(st.sampled_from(range(len(layouts))), max_size=5, unique=True))
    kept = wide.keep_rows(np.array(rows, dtype=np.int64))
    assert kept.size == 3 * len(rows)
    expected = [replace(layouts[row], zero=zero) for row in rows for zero in range(3)]
    assert [kept.one(index) for index in range(kept.size)] == expected
    picked = wide.take(np.array([3 * row + 1 for row in rows], dtype=np.int64))
    assert [picked.one(index) for index in range(picked.size)] == [replace(layouts[row], zero=1) for row in rows]


@given(layout=any_layout(), n_layers=st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_stage_layers_sum_to_the_model(layout: Layout, n_layers: int) -> None:
    stages = layout.pp * layout.vpp
    total = stages * n_layers - layout.short_first - layout.short_last
    if total > 0:
        layers = layout.stage_layers(total)
        assert (len(layers), sum(layers)) == (stages, total)


@law
def test_two_valid_layouts_of_a_setting_never_share_a_name(number: int, seed: int) -> None:
    """Of one setting: the batch and the number of devices are not in the name."""
    _, layouts = drawn(number, seed)
    found = {layouts.one(index) for index in range(min(layouts.size, 400))}
    assert len({layout.name for layout in found}) == len(found)


def test_short_stages_are_part_of_the_name() -> None:
    """6 layers and 2 fewer over 4 stages of 2: (1, 2, 2, 1), (0, 2, 2, 2) and (2, 2, 2, 0) would be three layouts."""
    layouts = [Layout(pp=4, schedule="1f1b", short_first=a, short_last=b) for a, b in ((0, 0), (1, 1), (0, 2), (2, 0))]
    assert len({layout.name for layout in layouts}) == 4
    assert layouts[1].stage_layers(6) == (1, 2, 2, 1)


def test_a_name_spells_what_is_used_and_no_more() -> None:
    layout = Layout(tp=8, sp=True, pp=4, dp=2, vpp=2, zero=1, dp_shard=2, recompute="full", schedule="interleaved")
    assert layout.name == "tp8-pp4-dp2-mbs1-vpp2-z1-full"
