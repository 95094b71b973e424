"""The space as a whole: what it holds and what it leaves out. test_search.py holds its every layout against loops."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import planner.space as space_module
from cost_models.layout import Layout
from cost_models.model import ModelSpec
from cost_models.rules import RULES, first_violations, violation
from cost_models.setting import Setting
from planner.bounds import Bounds, parse_bounds
from planner.question import ask
from planner.space import Space


def setting_of(model: str = "tiny", npus: int = 8, batch: int = 8) -> Setting:
    return ask(model=model, npus=npus, global_batch=batch).setting


def layouts_of(setting: Setting, *fix: str, most: tuple[str, ...] = ()) -> list[Layout]:
    space = Space(setting=setting, bounds=parse_bounds(fix, most))
    blocks = [part.block() for rows in space.rows(space.meshes()) for part in rows.parts()]
    return [block.one(i) for block in blocks for i in range(block.size)]


def count_of(setting: Setting, *fix: str) -> int:
    return sum(mesh.n_layouts for mesh in Space(setting=setting, bounds=parse_bounds(fix, ())).meshes())


@pytest.mark.parametrize(("model", "npus"), [("tiny", 4), ("tiny-moe", 4), ("tiny", 16)])
def test_no_layout_is_there_twice(model: str, npus: int) -> None:
    fix = ("micro_batch=1", "recompute=none", "offload=off", "swap=off")
    found = layouts_of(setting_of(model, npus, npus), *fix)
    assert len(set(found)) == len(found) == count_of(setting_of(model, npus, npus), *fix)


def test_every_layout_takes_all_devices() -> None:
    assert {layout.devices for layout in layouts_of(setting_of(), "recompute=none", "zero=0", "swap=off")} == {8}


def test_every_tp_cp_pp_dp_whose_product_is_the_devices_is_there() -> None:
    found = {(x.tp, x.cp, x.pp, x.dp) for x in layouts_of(setting_of(), "zero=0", "recompute=none", "swap=off")}
    # 8 = 2**3: ways to hand three twos to four degrees.
    assert len(found) == math.comb(3 + 3, 3)


def test_fixing_everything_leaves_one_layout() -> None:
    fix = (
        "tp=2,sp=on,cp=1,pp=2,dp=2,schedule=1f1b,micro_batch=2,zero=1,dp_shard=2,recompute=none,swap=off,offload=off",
    )
    assert [layout.name for layout in layouts_of(setting_of(), *fix)] == ["tp2-pp2-dp2-mbs2-z1"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("recompute", ["none", "selective", "full"]),
        ("swap_optimizer", ["on", "off"]),
        ("sp", ["on", "off"]),
        ("zero", ["0", "1", "2", "3"]),
        ("pp", ["1", "2", "4", "8"]),
        ("schedule", ["none", "gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v"]),
        ("reduce_gradients", ["last", "every"]),
        ("cp_kind", ["none", "ulysses", "allgather", "ring"]),
        ("micro_batch", ["1", "2", "4", "8"]),
    ],
)
def test_the_values_of_a_dimension_share_out_the_space(name: str, values: list[str]) -> None:
    setting = setting_of()
    assert sum(count_of(setting, f"{name}={value}") for value in values) == count_of(setting)
    assert all(count_of(setting, f"{name}={value}") for value in values)


@pytest.mark.parametrize("n_layers", [7, 30, 61, 126])
def test_short_stages_sum_to_the_layers_and_are_few(n_layers: int) -> None:
    setting = setting_of()
    model: ModelSpec = replace(setting.model, n_layers=n_layers)
    found = layouts_of(replace(setting, model=model), "tp=1", "cp=1", "micro_batch=1", "zero=0", "recompute=none")
    short = [layout for layout in found if layout.short_first or layout.short_last]
    assert short
    for layout in short:
        assert 0 < layout.short_first + layout.short_last <= 3
        assert 0 <= layout.short_last - layout.short_first <= 1
        if violation(setting=replace(setting, model=model), layout=layout) is None:
            stages = layout.stage_layers(n_layers)
            assert sum(stages) == n_layers
            assert max(stages) - min(stages) <= 2


def test_llama_405b_pipelines_with_126_layers_are_in_the_space() -> None:
    """Llama 3 trained pp 16 with one layer less in the first and the last stage: 126 layers in 128 places."""
    setting = ask(model="405B", npus=128, global_batch=16).setting
    found = layouts_of(setting, "tp=8,cp=1,pp=16,dp=1,schedule=1f1b,micro_batch=1,recompute=none", "zero=0", "sp=on")
    assert {(layout.short_first, layout.short_last) for layout in found} == {(1, 1)}
    assert all(violation(setting, layout) is None for layout in found)


def test_a_batch_that_dp_does_not_divide_leaves_one_row_to_be_rejected() -> None:
    setting = setting_of(batch=6)
    found = layouts_of(setting, "dp=4", "cp=1", "tp=2", "recompute=none", "zero=0", "swap=off", "offload=off")
    assert {layout.micro_batch for layout in found} == {1}
    assert {broken.code for layout in found if (broken := violation(setting, layout))} == {"B501"}


def test_dense_models_have_no_expert_parallelism() -> None:
    assert {layout.ep for layout in layouts_of(setting_of("tiny"), "zero=0", "recompute=none")} == {1}


def test_expert_parallelism_divides_the_experts_and_has_ranks() -> None:
    found = layouts_of(setting_of("tiny-moe"), "zero=0", "recompute=none")
    assert {layout.ep for layout in found} == {1, 2, 4}
    assert all(layout.ep <= layout.tp * layout.cp * layout.dp for layout in found)


@pytest.mark.parametrize(("npus", "placements"), [(8, 1), (16, 2)])
def test_placement_is_a_choice_where_the_job_leaves_a_node(npus: int, placements: int) -> None:
    found = layouts_of(setting_of(npus=npus, batch=16), "pp=2", "dp=2", "zero=0", "recompute=none", "micro_batch=1")
    assert len({layout.placement for layout in found}) == placements


@pytest.mark.parametrize("npus", [8, 16])
def test_what_the_plainest_row_breaks_all_its_layouts_break(npus: int) -> None:
    """Rules that are not `per_choice` decide rows: the search drops all layouts of a row by its plainest one."""
    setting = setting_of("tiny-moe", npus, 24)
    bounds = parse_bounds(("swap=off,recompute=full,cp=2",), ("micro_batch=2",))
    space = Space(setting=setting, bounds=bounds)
    per_row = np.array([*(not rule.per_choice for rule in RULES), False])
    for rows in space.rows(space.meshes()):
        block, plain = rows.block(), rows.plain()
        broken = np.broadcast_to(first_violations(setting, block), block.shape)
        of_plain = np.broadcast_to(first_violations(setting, plain), plain.shape)
        assert (broken[per_row[broken]] == np.broadcast_to(of_plain, block.shape)[per_row[broken]]).all()
        assert per_row[np.broadcast_to(of_plain, block.shape)].sum() == per_row[broken].sum()


def test_fixed_recomputed_layers_are_those_of_every_layout() -> None:
    space = Space(setting=setting_of(), bounds=parse_bounds(("recompute=layers=2",), ()))
    found = layouts_of(setting_of(), "recompute=layers=2", "cp=1", "zero=0", "micro_batch=1")
    assert {layout.recompute_text for layout in found} == {"layers=2"}
    assert space.layer_bounds is None


@pytest.mark.parametrize(
    ("fix", "most", "expected"),
    [
        ((), (), (1, 4)),
        ((), ("recompute_layers=2",), (1, 2)),
        (("recompute=none",), (), None),
        (("recompute=selective",), (), None),
        (("recompute=full",), (), None),
    ],
)
def test_some_layers_are_a_choice_unless_recomputation_is_fixed(
    fix: tuple[str, ...], most: tuple[str, ...], expected: tuple[int, int] | None
) -> None:
    assert Space(setting=setting_of(), bounds=parse_bounds(fix, most)).layer_bounds == expected


def test_parts_hold_all_rows_in_order_and_a_bounded_number_of_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "BLOCK_LAYOUTS", 1000)
    space = Space(setting=setting_of(), bounds=Bounds())
    for rows in space.rows(space.meshes()):
        parts = list(rows.parts())
        assert np.array_equal(np.concatenate([part.columns for part in parts]), rows.columns)
        assert all(part.block().size <= 1000 or len(part.columns) == 1 for part in parts)
        assert [int(code) for code in rows.schedule] == rows.block().schedule.reshape(-1).tolist()
