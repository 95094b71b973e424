"""The search against a brute force of nested loops that shares none of its shortcuts, and the laws of its bounds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.catalog import find_cluster, find_model
from cost_models.layout import RECOMPUTES, Layout, Layouts
from cost_models.memory import MemoryModel
from cost_models.prediction import host_budget_bytes, predict, usable_bytes
from cost_models.rules import violation
from cost_models.setting import Setting
from cost_models.step_time import StepTimeModel
from planner import search as search_module
from planner import space as space_module
from planner.bounds import Bounds, parse_bounds
from planner.candidates import TIE, complexity, rank_order
from planner.question import ask
from planner.search import KEPT, SearchResult, search
from planner.space import Rows, Space

MIB = 2**20
Fixed = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setting whose space is small enough to predict layout by layout.

    Attributes:
        fix, most: bounds in the words of Layout.
        usable_mib: device memory made up so that some layouts do not fit; 0 for the real one.
        host_mib: host memory of a node.
    """

    model: str = "tiny"
    devices: int = 4
    batch: int = 4
    seq_len: int = 128
    fix: tuple[tuple[str, object], ...] = ()
    most: tuple[tuple[str, int], ...] = ()
    usable_mib: int = 0
    host_mib: int = 1 << 20
    margin_mib: int = 0

    @property
    def setting(self) -> Setting:
        found = ask(model=self.model, npus=self.devices, seq_len=self.seq_len, global_batch=self.batch).setting
        device, cluster = found.cluster.device, found.cluster
        if self.usable_mib:
            size = self.usable_mib * MIB
            device = replace(device, memory_bytes=size, usable_memory_bytes=size, context_bytes=0)
            cluster = replace(cluster, communicator_buffer_bytes=MIB, p2p_buffer_bytes=0)
        return replace(found, cluster=replace(cluster, device=device, host_memory_bytes=self.host_mib * MIB))

    @property
    def bounds(self) -> Bounds:
        return parse_bounds(
            tuple(f"{name}={value}" for name, value in self.fix), tuple(f"{n}={v}" for n, v in self.most)
        )

    def allows(self, layout: Layout) -> bool:
        fixed = all(getattr(layout, name) == value for name, value in self.fix)
        return fixed and all(getattr(layout, name) <= value for name, value in self.most)

    def search(self, *, kept: int = KEPT) -> SearchResult:
        return search(self.setting, self.bounds, margin_bytes=self.margin_mib * MIB, kept=kept)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def schedules(layers: int, pp: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [("none", 1)]
    most = max(layers // pp, 2)
    interleaved = [("interleaved", vpp) for vpp in range(2, most + 1)]
    zero_bubble = [("zero-bubble", vpp) for vpp in range(1, most + 1)]
    return [("1f1b", 1), ("gpipe", 1), ("zb-v", 2), *interleaved, *zero_bubble]


def short_stages(layers: int, stages: int) -> tuple[int, int]:
    """Up to three layers that are missing to full stages are left out at both ends, more of them at the last."""
    for missing in (1, 2, 3):
        if stages > 1 and (layers + missing) % stages == 0 and layers % stages:
            return missing // 2, (missing + 1) // 2
    return 0, 0


def batches(global_batch: int, dp: int) -> list[tuple[int, int]]:
    if global_batch % dp:
        return [(1, max(global_batch // dp, 1))]
    return [
        (m, a) for m in range(1, global_batch + 1) for a in range(1, global_batch + 1) if m * a * dp == global_batch
    ]


def shardings(dp: int) -> list[tuple[int, int, str]]:
    sharded = [(zero, shard, "last") for zero in (1, 2, 3) for shard in divisors(dp)]
    return [(0, 1, "last"), *sharded, *((zero, shard, "every") for zero in (2, 3) for shard in divisors(dp))]


def meshes(devices: int) -> Iterator[tuple[int, int, int, int]]:
    for mesh in itertools.product(divisors(devices), repeat=4):
        if mesh[0] * mesh[1] * mesh[2] * mesh[3] == devices:
            yield mesh


def every_row(setting: Setting) -> Iterator[Layout]:
    """Every layout that differs in what shapes a micro batch."""
    model, batch = setting.model, setting.workload.global_batch
    for tp, cp, pp, dp in meshes(setting.n_devices):
        kinds = ["ulysses", "allgather", "ring"] if cp > 1 else ["none"]
        eps = [ep for ep in divisors(model.moe.experts) if ep <= tp * cp * dp] if model.moe else [1]
        sps = [True, False] if tp > 1 else [False]
        for sp, kind, ep in itertools.product(sps, kinds, eps):
            for (schedule, vpp), (micro, accumulation) in itertools.product(
                schedules(model.n_layers, pp), batches(batch, dp)
            ):
                first, last = short_stages(model.n_layers, pp * vpp)
                yield Layout(
                    tp=tp, sp=sp, cp=cp, cp_kind=kind, ep=ep, pp=pp, vpp=vpp, dp=dp, schedule=schedule,
                    micro_batch=micro, accumulation=accumulation, short_first=first, short_last=last,
                )  # fmt: skip


def every_layout(setting: Setting) -> Iterator[Layout]:
    for row in every_row(setting):
        far = row.pp > 1 and row.dp > 1 and setting.n_devices > setting.cluster.devices_per_node
        for (zero, shard, reduce_), recompute, swap, offload, placement in itertools.product(
            shardings(row.dp),
            ("none", "selective", "full"),
            (False, True),
            (False, True),
            ("tp-cp-dp-pp", "tp-cp-pp-dp") if far else ("tp-cp-dp-pp",),
        ):
            yield replace(
                row, zero=zero, dp_shard=shard, reduce_gradients=reduce_, recompute=recompute,
                swap_optimizer=swap, activation_offload=offload, placement=placement,
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Decided:
    """One valid layout, predicted alone."""

    layout: Layout
    step_s: float
    peak_bytes: float
    host_bytes: float


@dataclass(frozen=True, kw_only=True)
class Brute:
    """What the loops found; `lists_every` of the layouts that fit, `some_layers` those with `layers=N`."""

    layouts: int
    rejected: Counter[str]
    valid: list[Decided]
    fitting: list[Decided]
    some_layers: list[Decided]
    limit_bytes: float
    host_bytes: float


def decide(setting: Setting, layout: Layout) -> Decided:
    alone = predict(setting, Layouts.of([layout]))
    return Decided(
        layout=layout,
        step_s=float(alone.step_time_s[0]),
        peak_bytes=float(np.broadcast_to(alone.memory.peak_bytes, (1,))[0]),
        host_bytes=float(np.broadcast_to(alone.host_bytes_per_node, (1,))[0]),
    )


@cache
def brute_force(case: Case, *, layers: bool) -> Brute:
    setting = case.setting
    limit = usable_bytes(setting) - case.margin_mib * MIB
    host = host_budget_bytes(setting)
    layouts, rejected = 0, Counter[str]()
    valid: list[Decided] = []
    fitting: list[Decided] = []
    some_layers: list[Decided] = []
    for plain in every_layout(setting):
        layout = replace(plain, recompute_layers=dict(case.fix).get("recompute_layers", 0))
        if not case.allows(layout):
            continue
        layouts += 1
        broken = violation(setting, layout)
        if broken:
            rejected[broken.code] += 1
            continue
        valid.append(decide(setting, layout))
        if valid[-1].peak_bytes > limit:
            rejected["M101"] += 1
        elif valid[-1].host_bytes > host:
            rejected["M102"] += 1
        else:
            fitting.append(valid[-1])
        if layers and not layout.recompute_layers and layout.recompute == "full":
            most = layout.stage_layers(setting.model.n_layers)
            for n in range(1, max(most)):
                found = decide(setting, replace(layout, recompute_layers=n))
                if found.peak_bytes <= limit and found.host_bytes <= host:
                    some_layers.append(found)
    return Brute(
        layouts=layouts,
        rejected=rejected,
        valid=valid,
        fitting=fitting,
        some_layers=some_layers,
        limit_bytes=limit,
        host_bytes=host,
    )


def ranked(found: list[Decided]) -> list[Decided]:
    order = rank_order(Layouts.of([x.layout for x in found]), np.array([x.step_s for x in found]))
    return [found[i] for i in order]


def assert_agree(result: SearchResult, brute: Brute) -> None:
    assert result.layouts == brute.layouts
    assert result.rejected == dict(brute.rejected)
    assert result.feasible == len(brute.fitting)
    assert result.feasible + sum(result.rejected.values()) == result.layouts
    if not brute.fitting:
        assert result.best is None
        return
    assert result.best is not None
    expected = ranked([*brute.fitting, *brute.some_layers])
    assert result.best.layouts.one(0).name == expected[0].layout.name
    assert result.best.layouts.one(0) == expected[0].layout
    assert float(result.best.step_s[0]) == expected[0].step_s
    assert float(result.best.peak_bytes[0]) == expected[0].peak_bytes


def best_names(result: SearchResult) -> list[str]:
    return [result.best.layouts.one(i).name for i in range(len(result.best.step_s))] if result.best else []


ROOMY = Case(fix=(("cp", 1), ("tp", 2), ("pp", 1)), most=(("zero", 2), ("micro_batch", 1)))
TIGHT = Case(
    fix=(("cp", 1), ("pp", 2), ("tp", 1), ("schedule", "1f1b")),
    most=(("zero", 2),),
    seq_len=2048,
    usable_mib=40,
    margin_mib=2,
)
SMALL_HOST = replace(TIGHT, host_mib=12)
CONTEXT = Case(
    fix=(("cp", 2), ("tp", 1), ("activation_offload", False), ("swap_optimizer", False)),
    most=(("zero", 1), ("micro_batch", 2), ("vpp", 1)),
    seq_len=2048,
    usable_mib=28,
)
ODD_BATCH = Case(batch=6, fix=(("cp", 1), ("tp", 1), ("recompute", "none")), most=(("zero", 1), ("vpp", 1)))
EXPERTS = Case(
    model="tiny-moe",
    fix=(("cp", 1), ("pp", 1), ("swap_optimizer", False)),
    most=(("zero", 1), ("micro_batch", 2)),
    usable_mib=26,
)
EXPERTS_IN_PIPELINE = Case(
    model="tiny-moe",
    devices=8,
    batch=8,
    fix=(("cp", 1), ("pp", 2), ("dp", 4), ("micro_batch", 1), ("activation_offload", False), ("recompute", "none")),
    most=(("vpp", 1),),
    usable_mib=17,
)
EIGHT = Case(
    devices=8,
    batch=8,
    seq_len=1024,
    fix=(("cp", 1), ("dp", 2), ("micro_batch", 2), ("zero", 1), ("swap_optimizer", False)),
    usable_mib=23,
)
TWO_NODES = Case(
    devices=16,
    batch=16,
    fix=(("cp", 1), ("tp", 4), ("pp", 2), ("micro_batch", 2), ("recompute", "none")),
    most=(("zero", 1),),
)
ONE_LAYER = Case(
    fix=(("recompute", "full"), ("recompute_layers", 1), ("cp", 1), ("tp", 1), ("zero", 1)), seq_len=1024, usable_mib=28
)
FULL = Case(fix=(("tp", 2), ("recompute", "full"), ("cp", 1), ("zero", 1)), seq_len=1024, usable_mib=17)
SOME_LAYERS = Case(
    fix=(("tp", 4), ("sp", True), ("micro_batch", 4), ("cp", 1)),
    seq_len=2048,
    usable_mib=40,
)
OFFLOADED = Case(
    fix=(("tp", 1), ("pp", 1), ("cp", 1), ("activation_offload", True), ("micro_batch", 1)),
    seq_len=4096,
    usable_mib=48,
)

CASES = {
    "all of them fit": ROOMY,
    "a device too small for many": TIGHT,
    "a host too small for some": SMALL_HOST,
    "context parallel": CONTEXT,
    "a batch that some degrees do not divide": ODD_BATCH,
    "experts": EXPERTS,
    "experts in a pipeline": EXPERTS_IN_PIPELINE,
    "eight devices": EIGHT,
    "two nodes": TWO_NODES,
    "one recomputed layer asked for": ONE_LAYER,
    "full recomputation asked for": FULL,
    "some recomputed layers win": SOME_LAYERS,
    "offloaded activations": OFFLOADED,
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_the_search_agrees_with_a_brute_force(case: Case) -> None:
    assert_agree(case.search(), brute_force(case, layers="recompute" not in dict(case.fix)))


@pytest.mark.heavy
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(seq_len=2048, usable_mib=32, host_mib=30, margin_mib=1),
        Case(model="tiny-moe", seq_len=512, usable_mib=20, margin_mib=1),
        Case(devices=8, batch=8, fix=(("cp", 1),), most=(("zero", 2), ("vpp", 2)), seq_len=1024, usable_mib=20),
    ],
)
def test_the_search_agrees_with_a_brute_force_over_a_whole_space(case: Case) -> None:
    assert_agree(case.search(), brute_force(case, layers=True))


@pytest.mark.parametrize("name", ["all of them fit", "a device too small for many", "experts", "eight devices"])
def test_the_best_are_all_of_the_brute_force_in_its_order(name: str) -> None:
    case = CASES[name]
    setting = case.setting
    # No layers=N: of those only what competes is kept.
    bounds = replace(case.bounds, most=(*case.bounds.most, ("recompute_layers", 0)))
    brute = brute_force(case, layers="recompute" not in dict(case.fix))
    result = search(setting, bounds, margin_bytes=case.margin_mib * MIB)
    assert best_names(result) == [found.layout.name for found in ranked(brute.fitting)[:KEPT]]
    assert result.layer_choices == 0


def test_every_layout_has_a_name_of_its_own() -> None:
    layouts = [found.layout for found in brute_force(EXPERTS, layers=True).fitting]
    assert len({layout.name for layout in layouts}) == len(layouts)


@pytest.mark.parametrize("case", [ROOMY, TIGHT, EIGHT])
def test_the_best_are_sorted_and_ties_go_to_the_simpler_plan(case: Case) -> None:
    best = case.search().best
    assert best is not None
    machinery = complexity(best.layouts)
    coarse = np.round(np.log(best.step_s) / TIE)
    assert (np.diff(coarse) >= 0).all()
    same = np.diff(coarse) == 0
    assert same.any(), "no tie to decide"
    assert (np.diff(machinery)[same] >= 0).all()


def test_what_only_costs_more_machinery_comes_after() -> None:
    """With one micro batch on one rank an unused switch changes no time: the layout without it goes first."""
    names = best_names(Case(devices=1, batch=1).search())
    assert names[0] == "tp1-pp1-dp1-mbs1-z0"
    assert "tp1-pp1-dp1-mbs1-z0-swap" in names[1:]


@pytest.mark.parametrize("name", ["a host too small for some", "eight devices", "two nodes", "offloaded activations"])
def test_the_answer_does_not_depend_on_the_sizes_of_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    whole = case.search()
    monkeypatch.setattr(space_module, "BLOCK_LAYOUTS", 7)
    monkeypatch.setattr(space_module, "_MOST_ROWS", 1)
    monkeypatch.setattr(search_module, "TIMED_LAYOUTS", 5)
    monkeypatch.setattr(search_module, "_LAYER_CHOICES", 3)
    cut = case.search()
    assert best_names(cut) == best_names(whole)
    assert whole.best is not None
    assert cut.best is not None
    np.testing.assert_array_equal(cut.best.step_s, whole.best.step_s)
    assert [point.step_s for point in cut.front] == [point.step_s for point in whole.front]
    for name_ in ("layouts", "feasible", "rejected"):
        assert getattr(cut, name_) == getattr(whole, name_)


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_keeping_fewer_changes_nothing_about_those_kept(kept: int) -> None:
    for case in (TIGHT, EIGHT, OFFLOADED):
        assert best_names(case.search(kept=kept)) == best_names(case.search())[:kept]


@pytest.mark.parametrize("case", [TIGHT, CONTEXT, EIGHT, EXPERTS_IN_PIPELINE])
def test_no_layout_beats_a_front_point_in_both_time_and_room(case: Case) -> None:
    setting, front = case.setting, case.search().front
    brute = brute_force(case, layers="recompute" not in dict(case.fix))
    fitting = brute.fitting
    # Of `layers=N` those that compete for the best may be on the front; the others are not evaluated.
    known = {found.layout: found for found in (*fitting, *brute.some_layers)}
    usable = usable_bytes(setting)
    assert front
    for point in front:
        found = known[point.layout]
        assert point.step_s == found.step_s
        assert point.headroom_bytes == usable - found.peak_bytes
        for other in fitting:
            room = usable - other.peak_bytes
            assert not (other.step_s < point.step_s and room >= point.headroom_bytes), other.layout.name
    steps, rooms = [point.step_s for point in front], [point.headroom_bytes for point in front]
    assert steps == sorted(steps)
    assert rooms == sorted(rooms)
    assert steps[0] == min(found.step_s for found in known.values())


@pytest.mark.parametrize("case", [TIGHT, CONTEXT, EIGHT, EXPERTS_IN_PIPELINE])
def test_the_front_has_a_point_for_each_level_of_room(case: Case) -> None:
    """For each layout the front knows one as fast, with at most a 32nd of the device less room."""
    setting, front = case.setting, case.search().front
    level = usable_bytes(setting) / 32
    for found in brute_force(case, layers="recompute" not in dict(case.fix)).fitting:
        room = usable_bytes(setting) - found.peak_bytes
        assert any(point.step_s <= found.step_s and point.headroom_bytes > room - level for point in front)


def row_of(layout: Layout) -> Layout:
    """The layout without what multiplies a row."""
    return replace(
        layout, zero=0, dp_shard=1, reduce_gradients="last", recompute="none", swap_optimizer=False,
        activation_offload=False, placement="tp-cp-dp-pp",
    )  # fmt: skip


@pytest.mark.parametrize(("model", "devices"), [("70B", 4), ("405B", 8), ("deepseek-v3", 8)])
def test_the_nearest_of_a_large_space_lack_no_more_than_any_row(model: str, devices: int) -> None:
    """Every row's least, without the bounds in whose order the search looks at rows."""
    setting = ask(model=model, npus=devices, global_batch=16).setting
    result = search(setting, Bounds())
    assert not result.feasible
    least: list[float] = []
    for rows in Space(setting=setting, bounds=Bounds()).rows(Space(setting=setting, bounds=Bounds()).meshes()):
        for part in rows.keep(search_module.first_violations(setting, rows.plain()).reshape(-1) < 0).parts():
            block = part.block()
            allowed = np.broadcast_to(search_module.first_violations(setting, block) < 0, block.shape)
            memory = MemoryModel(setting, block)
            host = memory.fits_host(host_budget_bytes(setting) / devices)
            lacking = np.where(allowed & host, memory.peak_bytes() - usable_bytes(setting), np.inf)
            least += lacking.reshape(len(part.columns), -1).min(axis=1).tolist()
    assert [near.lacking_bytes for near in result.nearest] == sorted(least)[:3]


@pytest.mark.parametrize("case", [TIGHT, CONTEXT, EIGHT, EXPERTS, SMALL_HOST, ROOMY])
def test_where_nothing_fits_the_three_nearest_lack_the_least(case: Case) -> None:
    """The least that any choice of a row lacks, of three rows."""
    tiny = replace(case, usable_mib=5, margin_mib=0)
    brute = brute_force(tiny, layers=False)
    assert not brute.fitting
    result = tiny.search()
    assert result.feasible == 0
    assert result.best is None
    lacking = {
        found.layout: found.peak_bytes - brute.limit_bytes
        for found in brute.valid
        if found.host_bytes <= brute.host_bytes
    }
    least: dict[Layout, float] = {}
    for layout, bytes_ in lacking.items():
        least[row_of(layout)] = min(bytes_, least.get(row_of(layout), np.inf))
    assert [near.lacking_bytes for near in result.nearest] == sorted(least.values())[:3]
    for near in result.nearest:
        assert lacking[near.layout] == near.lacking_bytes > 0


MODELS = ("tiny", "tiny-moe", "llama2-7b", "llama3.1-70b", "mixtral-8x7b", "deepseek-v2-lite", "gpt2-1.5b")


@cache
def rows_of(model: str, devices: int, cluster: str, batch: int) -> list[Rows]:
    setting = setting_of(model, devices, cluster, batch)
    space = Space(setting=setting, bounds=Bounds())
    return [
        part
        for rows in space.rows(space.meshes())
        for part in rows.keep(search_module.first_violations(setting, rows.plain()).reshape(-1) < 0).parts()
    ]


def setting_of(model: str, devices: int, cluster: str, batch: int) -> Setting:
    return replace(
        ask(model=model, npus=devices, global_batch=batch).setting,
        cluster=find_cluster(cluster),
        model=find_model(model),
    )


@st.composite
def some_rows(draw: st.DrawFn) -> tuple[Setting, Rows]:
    where = (
        draw(st.sampled_from(MODELS)),
        draw(st.sampled_from([4, 8, 16])),
        draw(st.sampled_from(["atlas-800t-a2", "cloudmatrix384", "dgx-h100"])),
        draw(st.sampled_from([8, 24, 32])),
    )
    part = draw(st.sampled_from(rows_of(*where)))
    size = len(part.columns)
    picked = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3, unique=True))
    return setting_of(*where), part.keep(np.array(picked))


@settings(max_examples=60, deadline=None)
@given(some_rows())
def test_no_layout_of_a_row_is_faster_than_the_bound_of_the_row(drawn: tuple[Setting, Rows]) -> None:
    setting, rows = drawn
    bound = StepTimeModel(setting, rows.plain()).least_step_s().reshape(len(rows.columns), -1).min(axis=1)
    block = rows.block()
    flat = block.take(np.arange(block.size))
    valid = search_module.first_violations(setting, flat) < 0
    step = np.where(valid, StepTimeModel(setting, flat).step_s(), np.inf).reshape(len(bound), -1)
    assert (bound <= step.min(axis=1) * (1 + 1e-12)).all()


@settings(max_examples=60, deadline=None)
@given(some_rows(), st.integers(1, 8))
def test_recomputing_some_layers_is_never_faster_than_keeping_all_of_them_on_the_device(
    drawn: tuple[Setting, Rows], layers: int
) -> None:
    setting, rows = drawn
    block = rows.block()
    flat = block.take(np.flatnonzero(np.broadcast_to(block.recompute, block.shape) == RECOMPUTES.index("full")))
    none = np.zeros(flat.size, dtype=np.int64)
    some = replace(flat, recompute_layers=none + layers)
    valid = np.flatnonzero(search_module.first_violations(setting, some) < 0)
    bound = StepTimeModel(setting, replace(flat, recompute=none, activation_offload=none)).step_s()
    assert (bound[valid] <= StepTimeModel(setting, some).step_s()[valid] * (1 + 1e-12)).all()


@settings(max_examples=60, deadline=None)
@given(some_rows())
def test_no_layout_of_a_row_peaks_below_the_bound_of_the_row(drawn: tuple[Setting, Rows]) -> None:
    setting, rows = drawn
    block = rows.block()
    bound = MemoryModel(setting, block).least_peak_bytes().reshape(-1)
    flat = block.take(np.arange(block.size))
    peak = MemoryModel(setting, flat).peak_bytes().reshape(len(rows.columns), -1)
    assert (np.broadcast_to(bound, len(peak)) <= peak.min(axis=1) * (1 + 1e-12)).all()


@settings(max_examples=40, deadline=None)
@given(some_rows(), st.floats(0.02, 1.2))
def test_fits_decides_as_the_peak_does(drawn: tuple[Setting, Rows], share: float) -> None:
    setting, rows = drawn
    limit = share * usable_bytes(setting)
    block = rows.block()
    memory = MemoryModel(setting, block)
    peak = np.broadcast_to(memory.peak_bytes(), block.shape)
    valid = np.broadcast_to(search_module.first_violations(setting, block) < 0, block.shape)
    # Of others it need not be right.
    differs = (np.broadcast_to(memory.fits(limit, valid), block.shape) != (peak <= limit)) & valid
    assert not (differs & (np.abs(peak / limit - 1) > 1e-12)).any()


def test_progress_ends_with_every_layout_decided() -> None:
    told: list[tuple[int, int]] = []
    result = search(TIGHT.setting, TIGHT.bounds, progress=lambda done, layouts: told.append((done, layouts)))
    assert told[-1] == (result.layouts, result.layouts)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_bounds_that_leave_nothing_leave_an_empty_answer() -> None:
    result = search(ROOMY.setting, parse_bounds(("tp=3",), ()))
    assert (result.layouts, result.feasible, result.best, result.nearest, result.front) == (0, 0, None, (), ())


def test_each_rejected_code_has_an_example_that_breaks_just_that_rule() -> None:
    for case in (ODD_BATCH, EXPERTS, EIGHT, ONE_LAYER):
        result = case.search()
        assert set(result.examples) == set(result.rejected)
        for code in set(result.rejected) - {"M101", "M102"}:
            broken = violation(case.setting, result.examples[code])
            assert broken is not None
            assert broken.code == code
            assert case.allows(result.examples[code])
