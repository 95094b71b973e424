"""Each rule against a statement of it in plain arithmetic, and what it tells about a layout that breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster, find_model
from cost_models.layout import CP_KINDS, PLACEMENTS, RECOMPUTES, REDUCTIONS, Layout, Layouts
from cost_models.model import ModelSpec
from cost_models.rules import CHOICE_RULES, GENERAL_RULES, RULES, Rule, first_violations, violation
from cost_models.schedules import SCHEDULES
from cost_models.setting import Setting
from cost_models.stack import TITAN
from cost_models.workload import Workload


def setting_of(
    model: ModelSpec | str = "llama2-70b",
    n_devices: int = 64,
    *,
    cluster: str = "atlas-800t-a2",
    batch: int = 256,
    seq_len: int = 4096,
    fused_attention: bool = True,
    precision: str = "bf16",
) -> Setting:
    found = find_cluster(cluster)
    return Setting(
        model=find_model(model) if isinstance(model, str) else model,
        workload=Workload(seq_len=seq_len, global_batch=batch, fused_attention=fused_attention, precision=precision),
        cluster=found,
        stack=TITAN,
        calibration=calibration_of(found.device.name),
        n_devices=n_devices,
    )


def rule(code: str) -> Rule:
    (found,) = (rule for rule in RULES if rule.code == code)
    return found


# --- every rule once more, for one layout, from the words of the rule ---


def stages_by_hand(n_layers: int, x: Layout) -> list[int] | None:
    """Layers of each virtual stage; None where no equal number fits."""
    stages = x.pp * x.vpp
    each = [size for size in range(1, n_layers + 5) if size * stages == n_layers + x.short_first + x.short_last]
    if not each:
        return None
    layers = each * stages
    layers[0] -= x.short_first
    layers[-1] -= x.short_last
    return layers


def layers_fit(s: Setting, x: Layout) -> bool:
    layers = stages_by_hand(s.model.n_layers, x)
    return layers is not None and min(layers) >= 0


def no_stage_is_empty(s: Setting, x: Layout) -> bool:
    layers = stages_by_hand(s.model.n_layers, x)
    return layers is None or min(layers) >= 1


def schedule_fits(_: Setting, x: Layout) -> bool:
    """The constructors of torch 2.13's schedules, and what a loop without pipeline is."""
    rounds = max(1, x.accumulation // x.pp)
    return {
        "none": x.pp == 1 and x.vpp == 1,
        "gpipe": x.pp > 1 and x.vpp == 1,
        "1f1b": x.pp > 1 and x.vpp == 1 and x.accumulation >= x.pp,
        "interleaved": x.pp > 1 and x.vpp > 1 and x.accumulation % rounds == 0,
        "zero-bubble": x.pp > 1 and x.accumulation % rounds == 0,
        "zb-v": x.pp > 1 and x.vpp == 2,
    }[x.schedule]


def stages_fit(_: Setting, x: Layout) -> bool:
    if x.pp == 1:
        return x.schedule == "none" and x.vpp == 1
    one_stage, several = {"1f1b", "gpipe", "zero-bubble"}, {"interleaved", "zero-bubble"}
    names = one_stage if x.vpp == 1 else several | {"zb-v"} if x.vpp == 2 else several
    return x.schedule in names


def widths(s: Setting, x: Layout) -> list[int]:
    moe = s.model.moe
    found = [s.model.ffn_dim] if s.model.dense_layers else []
    if moe and moe.shared_ffn_dim:
        found.append(moe.shared_ffn_dim)
    return [*found, moe.ffn_dim] if moe and x.ep == 1 else found


def expert_ranks_fit(_: Setting, x: Layout) -> bool:
    """Walk outwards: take a whole number of tp ranks, when all are taken of cp, then of shards, then of replicas."""
    left = x.ep
    for size in (x.tp, x.cp, *((x.dp_shard, max(x.dp // x.dp_shard, 1)) if x.zero else (x.dp,))):
        taken = min(left, size)
        if left % taken or size % taken:
            return False
        left //= taken
    return left == 1


def ulysses_fits(s: Setting, x: Layout) -> bool:
    if x.cp_kind != "ulysses":
        return True
    local = max(s.model.attention_kv_heads // x.tp, 1)
    return s.model.n_heads % (x.tp * x.cp) == 0 and (local % x.cp == 0 or x.cp % local == 0)


def recompute_fits(s: Setting, x: Layout) -> bool:
    each = (s.model.n_layers + x.short_first + x.short_last) // (x.pp * x.vpp)
    return x.recompute_layers == 0 or (x.recompute == "full" and x.recompute_layers < each)


def padded(vocab: int, tp: int) -> int:
    return -(-vocab // tp) * tp


Statement = Callable[[Setting, Layout], bool]
STATEMENTS: dict[str, Statement] = {
    "T310": lambda s, x: x.tp * x.cp * x.pp * x.dp == s.n_devices,
    "D201": layers_fit,
    "D202": lambda s, x: s.model.n_heads % x.tp == 0,
    "D203": lambda s, x: s.model.attention_kv_heads % x.tp == 0,
    "D204": lambda s, x: all(width % x.tp == 0 for width in widths(s, x)),
    "D205": lambda s, x: s.model.moe.experts % x.ep == 0 if s.model.moe else x.ep == 1,
    "D206": expert_ranks_fit,
    "D207": lambda s, x: (
        x.cp == 1 or s.workload.seq_len % (x.cp * (2 if x.cp_kind in {"ring", "allgather"} else 1)) == 0
    ),
    "D208": lambda s, x: not x.sp or s.workload.seq_len % (x.tp * x.cp) == 0,
    "D209": lambda s, x: padded(s.model.vocab_size, x.tp) <= 1.05 * s.model.vocab_size,
    "D210": ulysses_fits,
    "D211": lambda _, x: x.dp % x.dp_shard == 0 and (x.zero > 0 or x.dp_shard == 1),
    "D212": lambda _, x: x.zero == 0 or x.dp_shard > 1 or x.cp > 1,
    "S401": schedule_fits,
    "S407": stages_fit,
    "S408": no_stage_is_empty,
    "S402": lambda _, x: x.pp > 1 or x.short_first == x.short_last == 0,
    "S403": recompute_fits,
    "B501": lambda s, x: x.micro_batch * x.accumulation * x.dp == s.workload.global_batch,
    "B502": lambda _, x: x.reduce_gradients == "last" or (x.accumulation > 1 and x.zero in {2, 3}),
    "R701": lambda s, x: (x.cp_kind == "none") if x.cp == 1 else (x.cp_kind != "none" and s.workload.fused_attention),
    "R705": lambda s, _: (
        s.workload.precision in {"bf16", "fp16", "fp32"}
        and s.workload.fused_attention
        and s.workload.causal
        and not s.workload.dropout
        and (s.model.position != "learned" or s.workload.seq_len <= s.model.positions)
    ),
    "R703": lambda _, x: x.tp > 1 or not x.sp,
    "R704": lambda _, x: x.ep == 1 or x.tp == 1 or x.sp,
}
SETTINGS = (
    setting_of(),
    setting_of("qwen2.5-0.5b", 8, cluster="local", batch=24, seq_len=120),
    setting_of("mixtral-8x7b", 16, batch=64, seq_len=1024),
    setting_of("deepseek-v2-lite", 16, batch=48, seq_len=96),
    setting_of("gpt2-1.5b", 12, batch=36, seq_len=1000, fused_attention=False),
    setting_of("tiny-moe", 8, cluster="local", batch=16, seq_len=128),
    setting_of(replace(find_model("tiny"), vocab_size=10), 8, cluster="local", batch=16, seq_len=128),
)


@st.composite
def any_layout(draw: st.DrawFn) -> Layout:
    """Also layouts that no rule would let pass."""
    degree, few = st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 2, 4])
    return Layout(
        tp=draw(degree),
        sp=draw(st.booleans()),
        cp=draw(few),
        cp_kind=draw(st.sampled_from(CP_KINDS)),
        ep=draw(st.sampled_from([1, 1, 2, 3, 4, 8])),
        pp=draw(degree),
        vpp=draw(st.integers(1, 4)),
        dp=draw(degree),
        dp_shard=draw(few),
        zero=draw(st.integers(0, 3)),
        micro_batch=draw(few),
        accumulation=draw(st.sampled_from([1, 2, 3, 4, 8, 9, 64])),
        schedule=draw(st.sampled_from(SCHEDULES)),
        recompute=draw(st.sampled_from(RECOMPUTES)),
        recompute_layers=draw(st.integers(0, 4)),
        reduce_gradients=draw(st.sampled_from(REDUCTIONS)),
        swap_optimizer=draw(st.booleans()),
        activation_offload=draw(st.booleans()),
        placement=draw(st.sampled_from(PLACEMENTS)),
        short_first=draw(st.sampled_from([0, 0, 0, 1, 2])),
        short_last=draw(st.sampled_from([0, 0, 0, 1, 2])),
    )


def test_every_rule_has_a_statement() -> None:
    assert {rule.code for rule in RULES} == set(STATEMENTS)
    assert len({rule.code for rule in RULES}) == len(RULES)


@given(setting=st.sampled_from(SETTINGS), layouts=st.lists(any_layout(), min_size=1, max_size=40))
@settings(max_examples=80, deadline=None)
def test_rules_over_columns_say_what_their_statements_say(setting: Setting, layouts: list[Layout]) -> None:
    columns = Layouts.of(layouts)
    for tried in RULES:
        found = np.broadcast_to(tried.holds(setting, columns), columns.shape).tolist()
        expected = [STATEMENTS[tried.code](setting, layout) for layout in layouts]
        assert found == expected, (tried.code, [x for x, a, b in zip(layouts, found, expected, strict=True) if a != b])


@given(setting=st.sampled_from(SETTINGS), layouts=st.lists(any_layout(), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_the_first_rule_that_a_layout_breaks_is_the_one_that_counts(setting: Setting, layouts: list[Layout]) -> None:
    found = first_violations(setting, Layouts.of(layouts)).tolist()
    for index, layout in zip(found, layouts, strict=True):
        broken = [i for i, tried in enumerate(RULES) if not STATEMENTS[tried.code](setting, layout)]
        assert index == (broken[0] if broken else -1)
        told = violation(setting, layout)
        assert (told.code if told else None) == (RULES[broken[0]].code if broken else None)


@given(setting=st.sampled_from(SETTINGS), layout=any_layout())
@settings(max_examples=100, deadline=None)
def test_any_broken_rule_can_be_told(setting: Setting, layout: Layout) -> None:
    for tried in RULES:
        if not STATEMENTS[tried.code](setting, layout):
            assert tried.reason(setting, layout)


# --- one layout that breaks each rule, and what is said about it ---

SOUND = Layout(tp=4, sp=True, pp=4, dp=4, accumulation=64, schedule="1f1b")
LLAMA = SETTINGS[0]
MIXTRAL = setting_of("mixtral-8x7b", 64)
SHARED_MESH = replace(SOUND, ep=8)

BREAKS: list[tuple[str, Setting, Layout, list[str]]] = [
    ("T310", LLAMA, replace(SOUND, dp=2), ["4", "32", "64"]),
    ("D201", LLAMA, replace(SOUND, pp=3), ["80", "3"]),
    ("D201", LLAMA, replace(SOUND, short_first=1), ["80", "81", "4"]),
    ("S408", setting_of("tiny", 4), Layout(pp=4, schedule="1f1b", short_first=2, short_last=2), ["0", "2"]),
    ("S408", setting_of("tiny", 3), Layout(pp=3, schedule="1f1b", short_last=2), ["2", "0"]),
    ("D202", LLAMA, replace(SOUND, tp=6), ["64", "6"]),
    ("D203", LLAMA, replace(SOUND, tp=16), ["8", "16"]),
    ("D204", setting_of("llama2-7b"), replace(SOUND, tp=3), ["11008", "3"]),
    ("D205", MIXTRAL, replace(SOUND, ep=3), ["8", "3"]),
    ("D205", LLAMA, replace(SOUND, ep=2), ["2", "no experts"]),
    ("D206", MIXTRAL, replace(SOUND, ep=3), ["3", "4"]),
    ("D206", MIXTRAL, replace(SHARED_MESH, dp=6, zero=1, dp_shard=3, ep=8), ["8", "4", "6", "3"]),
    ("D207", LLAMA, replace(SOUND, cp=3, cp_kind="ulysses"), ["4096", "3"]),
    ("D207", setting_of(seq_len=4), replace(SOUND, cp=4, cp_kind="ring"), ["4", "2 x cp 4"]),
    ("D208", setting_of(seq_len=100), replace(SOUND, tp=8), ["100", "8"]),
    ("D209", SETTINGS[-1], replace(SOUND, tp=8), ["10", "16", "8"]),
    ("D210", setting_of("gpt2-1.5b"), replace(SOUND, tp=1, sp=False, cp=2, cp_kind="ulysses"), ["25", "2"]),
    ("D211", LLAMA, replace(SOUND, zero=1, dp_shard=3), ["3", "4"]),
    ("D211", LLAMA, replace(SOUND, dp_shard=2), ["2", "ZeRO-0"]),
    ("D212", LLAMA, replace(SOUND, zero=2), ["ZeRO-2", "1 rank"]),
    ("S401", LLAMA, replace(SOUND, accumulation=2), ["1f1b", "4", "2"]),
    ("S401", LLAMA, replace(SOUND, schedule="zb-v"), ["zb-v", "vpp 2"]),
    ("S401", LLAMA, replace(SOUND, schedule="interleaved", vpp=2, accumulation=9), ["9", "even"]),
    ("S407", LLAMA, replace(SOUND, schedule="none"), ["none", "4", "1"]),
    ("S407", LLAMA, replace(SOUND, vpp=2), ["1f1b", "4", "2"]),
    ("S402", LLAMA, replace(SOUND, pp=1, short_last=2), ["2", "pp 1"]),
    ("S403", LLAMA, replace(SOUND, recompute="full", recompute_layers=20), ["20", "full"]),
    ("S403", LLAMA, replace(SOUND, recompute_layers=2), ["2", "none"]),
    ("B501", LLAMA, replace(SOUND, accumulation=8), ["8", "32", "256"]),
    ("B502", LLAMA, replace(SOUND, reduce_gradients="every", zero=1, dp_shard=4), ["ZeRO-1", "64"]),
    ("R701", LLAMA, replace(SOUND, cp=2), ["2", "none"]),
    ("R701", setting_of(fused_attention=False), replace(SOUND, cp=2, cp_kind="ring"), ["2", "unfused"]),
    ("R705", setting_of(precision="fp8"), SOUND, ["fp8"]),
    ("R705", setting_of("gpt2-1.5b", seq_len=2048), SOUND, ["2048", "1024"]),
    ("R703", LLAMA, replace(SOUND, tp=1), ["1"]),
    ("R704", MIXTRAL, replace(SOUND, sp=False, ep=8), ["8", "4"]),
]


def test_every_rule_has_a_layout_that_breaks_it() -> None:
    assert {code for code, *_ in BREAKS} == {tried.code for tried in RULES}


@pytest.mark.parametrize(("code", "setting", "layout", "says"), BREAKS)
def test_a_broken_rule_shows_its_numbers(code: str, setting: Setting, layout: Layout, says: list[str]) -> None:
    tried = rule(code)
    assert not tried.holds(setting, Layouts.of([layout])).all()
    reason = tried.reason(setting, layout)
    for text in says:
        assert re.search(rf"(?<!\d){re.escape(text)}(?!\d)", reason), (text, reason)


@pytest.mark.parametrize("code", [tried.code for tried in RULES])
def test_every_rule_lets_a_sound_layout_pass(code: str) -> None:
    assert rule(code).holds(LLAMA, Layouts.of([SOUND])).all()


@pytest.mark.parametrize("tried", RULES, ids=lambda tried: tried.code)
def test_a_rule_is_told_in_full(tried: Rule) -> None:
    assert re.fullmatch(r"[A-Z][1-7]\d\d", tried.code)
    assert all(len(text) > 8 for text in (tried.title, tried.explanation, tried.example, tried.source))


@pytest.mark.parametrize(("dp", "shard", "ep", "fits"), [(4, 2, 16, True), (4, 4, 8, True), (6, 3, 8, False)])
def test_experts_take_a_part_of_a_group_of_shards_or_whole_groups(dp: int, shard: int, ep: int, fits: bool) -> None:
    """ep 16 and 8 take 4 and 2 of the dp ranks, tp being 4; 2 ranks are no part of 3, nor a multiple."""
    moe = setting_of(replace(find_model("mixtral-8x7b"), n_layers=80), 64)
    wide = replace(SOUND, dp=dp, ep=ep, zero=2, dp_shard=shard)
    assert bool(rule("D206").holds(moe, Layouts.of([wide])).all()) == fits


def test_limits_of_our_trainer_do_not_bind_other_programs() -> None:
    layout = Layout(dp=2, accumulation=8)
    low = setting_of("tiny", 2, cluster="local", batch=16, seq_len=128, precision="fp8")
    told = violation(low, layout)
    assert told is not None
    assert told.code == "R705"
    assert violation(low, layout, trainer=False) is None


@pytest.mark.parametrize(
    "layout",
    [
        replace(SOUND, schedule="none"),
        replace(SOUND, pp=1, dp=16, accumulation=16),
        replace(SOUND, vpp=2),
        replace(SOUND, pp=1, dp=16, accumulation=16, schedule="none", vpp=2),
    ],
)
def test_no_program_runs_a_pipeline_without_a_schedule_or_one_stage_as_two(layout: Layout) -> None:
    """Such a layout has no meaning, and memory and time of it none either: not a limit of our trainer."""
    assert violation(LLAMA, layout, trainer=False) is not None


def test_choice_rules_depend_on_what_is_chosen_and_the_others_do_not() -> None:
    """The search drops whole meshes by the others, so no choice of ZeRO, recompute or swap may change them."""
    choices = [
        {"zero": zero, "dp_shard": shard, "recompute": recompute, "reduce_gradients": reduction, "swap_optimizer": swap}
        for zero, shard in ((0, 1), (1, 2), (3, 4))
        for recompute in RECOMPUTES
        for reduction in REDUCTIONS
        for swap in (False, True)
    ]
    for tried in RULES:
        if tried not in CHOICE_RULES:
            for _, setting, layout, _ in BREAKS:
                columns = Layouts.of([replace(layout, **choice) for choice in choices])
                held = np.broadcast_to(tried.holds(setting, columns), columns.shape)
                assert held.all() or not held.any(), tried.code


# --- the users' guide ---

GUIDE = [
    (setting_of("llama2-7b", 8, batch=16), Layout(dp=8, accumulation=2)),
    (
        setting_of("llama2-70b", 64, batch=256),
        Layout(
            tp=4,
            sp=True,
            pp=4,
            dp=4,
            dp_shard=4,
            zero=2,
            micro_batch=1,
            accumulation=64,
            schedule="1f1b",
            recompute="full",
        ),
    ),
]


@pytest.mark.parametrize(("setting", "layout"), GUIDE, ids=lambda value: getattr(value, "name", ""))
def test_the_layouts_of_the_users_guide_are_valid(setting: Setting, layout: Layout) -> None:
    assert violation(setting, layout) is None


def test_the_guide_s_own_batch_is_refused_with_the_arithmetic() -> None:
    """Its example says batch 256, micro batch 1, accumulation 8, dp 4; the product is 32."""
    setting, layout = GUIDE[1]
    told = violation(setting, replace(layout, accumulation=8))
    assert told is not None
    assert told.code == "B501"
    assert "= 32" in told.reason
    assert "256" in told.reason


def test_a_subset_of_rules_is_counted_within_itself() -> None:
    """An index of `first_violations` is one of the rules that were given."""
    columns = Layouts.of([replace(SOUND, dp=2), replace(SOUND, zero=2), SOUND])
    assert [CHOICE_RULES[i].code if i >= 0 else "" for i in first_violations(LLAMA, columns, CHOICE_RULES)] == [
        "",
        "D212",
        "",
    ]
    assert all(not tried.trainer_only for tried in GENERAL_RULES)
