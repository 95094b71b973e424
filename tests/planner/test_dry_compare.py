"""The prediction of any one rank, and what is said where a dry run finds something else."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster, find_model
from cost_models.errors import TitanPlanError
from cost_models.layout import Layout, Layouts
from cost_models.memory import MemoryModel
from cost_models.parameters import Stage, stage_of, telling_stages
from cost_models.setting import Setting
from cost_models.stack import TITAN
from cost_models.workload import Workload
from planner.answer_json import tool_name
from planner.dry_compare import TENSORS, DeviceRoom, DryComparison, compare, comparison_object, predict_rank
from planner.dry_setting import check_version, first_ranks, setting_of, worst_rank
from runtime.config_values import PlanSummary, TrainConfig
from tests.planner.dry_runs import a_run

LAYOUTS = (
    Layout(),
    Layout(pp=4, dp=2, accumulation=8, schedule="1f1b", zero=1, dp_shard=2),
    Layout(pp=4, accumulation=8, schedule="1f1b", short_first=1, short_last=3),
    Layout(pp=2, vpp=2, accumulation=4, schedule="interleaved", short_last=1),
    Layout(pp=4, vpp=2, accumulation=8, schedule="zb-v", short_first=1, short_last=1),
    Layout(tp=2, sp=True, pp=2, dp=2, accumulation=4, schedule="1f1b", placement="tp-cp-pp-dp"),
)
CAPTIONS = [layout.name for layout in LAYOUTS]


def setting_for(layout: Layout, model: str = "tiny", n_layers: int = 0, cluster: str = "atlas-800t-a2") -> Setting:
    spec, where = find_model(model), find_cluster(cluster)
    spec = replace(spec, n_layers=n_layers) if n_layers else spec
    batch = layout.dp * layout.micro_batch * layout.accumulation
    return Setting(
        model=spec,
        workload=Workload(seq_len=64, global_batch=batch),
        cluster=where,
        stack=TITAN,
        calibration=calibration_of(where.device.name),
        n_devices=layout.devices,
    )


def layers_for(layout: Layout) -> int:
    """Two a virtual stage where it is not short."""
    return 4 * layout.pp * layout.vpp - layout.short_first - layout.short_last


@pytest.mark.parametrize("layout", LAYOUTS, ids=CAPTIONS)
def test_the_stages_of_all_ranks_are_the_whole_model(layout: Layout) -> None:
    model = replace(find_model("tiny"), n_layers=layers_for(layout))
    stages = [stage_of(model, Layouts.of([layout]), rank) for rank in range(layout.pp)]
    assert sum(float(stage.layers[0]) for stage in stages) == model.n_layers
    assert sum(float(stage.has_embedding[0]) for stage in stages) == 1
    assert sum(float(stage.has_head[0]) for stage in stages) == 1
    assert all(stage.exists.all() for stage in stages)
    assert not stage_of(model, Layouts.of([layout]), layout.pp).exists.any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=CAPTIONS)
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_a_rank_that_the_search_looks_at_is_the_same_here(layout: Layout, name: str) -> None:
    model, layouts = replace(find_model(name), n_layers=layers_for(layout)), Layouts.of([layout])
    told = [stage for stage in telling_stages(model, layouts) if stage.exists.all()]
    assert told
    for stage in told:
        assert _numbers(stage_of(model, layouts, int(stage.rank[0]))) == _numbers(stage)


def _numbers(stage: Stage) -> list[float]:
    columns = (stage.rank, stage.dense_layers, stage.moe_layers, stage.has_embedding, stage.has_head)
    return [float(np.asarray(column)[0]) for column in columns]


def test_layers_before_the_middle_count_as_the_trainer_cuts_them() -> None:
    layout = LAYOUTS[2]
    model = replace(find_model("tiny"), n_layers=12)
    stages = [stage_of(model, Layouts.of([layout]), rank) for rank in range(4)]
    assert [float(stage.layers[0]) for stage in stages] == [3, 4, 4, 1]


def test_the_categories_are_tensors_and_sum_to_the_peak() -> None:
    layout = LAYOUTS[1]
    found = predict_rank(setting_for(layout), layout, 0)
    assert tuple(found.memory_bytes) == TENSORS
    assert sum(found.memory_bytes.values()) == found.peak_bytes


def test_one_device_updates_every_parameter_in_full_precision() -> None:
    setting = setting_for(Layout())
    found, parameters = predict_rank(setting, Layout(), 0), setting.model.total_params
    assert found.parameter_bytes == found.gradient_bytes == 4 * parameters
    assert found.optimizer_bytes == 8 * parameters
    assert found.traffic == ()


def test_the_worst_rank_has_the_peak_of_the_whole_estimate() -> None:
    layout = Layout(tp=2, sp=True, pp=4, dp=2, accumulation=8, schedule="1f1b")
    setting = setting_for(layout, n_layers=16, cluster="dgx-h100")  # its attention keeps what the CPU's keeps
    rank = worst_rank(setting, layout)
    assert rank in first_ranks(layout)
    highest = float(MemoryModel(setting, Layouts.of([layout])).estimate().allocated_bytes[0])
    assert predict_rank(setting, layout, rank).peak_bytes == pytest.approx(highest, abs=4)
    assert all(predict_rank(setting, layout, other).peak_bytes <= highest + 4 for other in first_ranks(layout))


@pytest.mark.parametrize(
    ("placement", "ranks"), [("tp-cp-dp-pp", (0, 4)), ("tp-cp-pp-dp", (0, 2))], ids=["pp far", "dp far"]
)
def test_the_first_rank_of_a_stage_follows_the_placement(placement: str, ranks: tuple[int, ...]) -> None:
    assert first_ranks(Layout(tp=2, pp=2, dp=2, placement=placement)) == ranks


def test_a_run_as_predicted_has_no_problems() -> None:
    layout = LAYOUTS[1]
    setting = setting_for(layout)
    compared = compare(setting, layout, a_run(layout, setting, 3))
    assert (compared.rank, compared.stage) == (3, 1)
    assert compared.difference == pytest.approx(0, abs=1e-4)
    assert compared.problems() == ()


@pytest.mark.parametrize(("factor", "word"), [(1 / 1.08, "more"), (1 / 0.92, "less")])
def test_a_prediction_that_is_off_is_a_problem(factor: float, word: str) -> None:
    setting = setting_for(Layout())
    (problem,) = compare(setting, Layout(), a_run(Layout(), setting, 0, factor=factor)).problems()
    assert f"8.0% {word} memory is predicted than the trainer takes" in problem


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"forward_flops": 0.0}, "FLOPs are predicted, the trainer computes"),
        ({"parameter_bytes": 8}, "parameter bytes are predicted, the trainer has 8"),
        ({"optimizer_bytes": 8}, "optimizer bytes are predicted, the trainer has 8"),
        ({"messages": ()}, "bytes are predicted, the trainer sends 0 with 0"),
    ],
    ids=["work", "parameters", "optimizer", "messages"],
)
def test_work_states_and_messages_are_predicted_exactly(changed: dict[str, object], told: str) -> None:
    layout = LAYOUTS[1]
    setting = setting_for(layout)
    run = a_run(layout, setting, 3)
    problems = compare(setting, layout, replace(run, run=replace(run.run, **changed))).problems()
    assert problems
    assert all(told in problem for problem in problems)


def test_the_order_of_a_groups_ranks_is_no_difference() -> None:
    layout = LAYOUTS[1]
    setting = setting_for(layout)
    run = a_run(layout, setting, 3)
    turned = tuple(replace(message, ranks=message.ranks[::-1]) for message in run.run.messages)
    assert compare(setting, layout, replace(run, run=replace(run.run, messages=turned))).problems() == ()


@pytest.mark.parametrize("factor", [1 / 1.05, 1 / 0.95])
def test_a_small_difference_is_none(factor: float) -> None:
    setting = setting_for(Layout())
    assert compare(setting, Layout(), a_run(Layout(), setting, 0, factor=factor)).problems() == ()


def test_the_device_holds_more_than_tensors() -> None:
    room = DeviceRoom(
        known=True,
        communication_bytes=300,
        context_bytes=1000,
        fragmentation=0.1,
        statistics_bytes=500,
        usable_bytes=3000,
    )
    assert room.peak_bytes(1000) == 300 + 1000 + 1650


def test_a_rank_that_does_not_fit_is_told_unless_the_device_is_unknown() -> None:
    setting = setting_for(Layout())
    run = a_run(Layout(), setting, 0)
    compared = compare(setting, Layout(), run)
    small = replace(compared, room=replace(compared.room, usable_bytes=2**29))
    (problem,) = small.problems()
    assert "does not fit" in problem
    assert "of the 0.50 GiB" in problem
    assert replace(small, room=replace(small.room, known=False)).problems() == ()


def test_the_device_makes_more_softmax_statistics_than_the_dry_run_where_attention_is_the_peak() -> None:
    """64 bytes of the Ascend kernel for each token and head of one layer; none at a peak that is elsewhere."""
    layout, setting = Layout(), setting_for(Layout())
    assert compare(setting, layout, a_run(layout, setting, 0)).room.statistics_bytes == 0
    narrow = replace(setting.model, n_heads=64, n_kv_heads=64, head_dim=2, ffn_dim=1, vocab_size=8)
    long = replace(setting, model=narrow, workload=replace(setting.workload, seq_len=4096))
    room = compare(long, layout, a_run(layout, long, 0)).room
    assert 0 < room.statistics_bytes <= 64 * 4096 * narrow.n_heads
    assert room.usable_bytes == find_cluster("atlas-800t-a2").device.usable_memory_bytes


def test_the_object_has_the_keys_that_programs_rely_on() -> None:
    layout = LAYOUTS[1]
    setting = setting_for(layout)
    told = json.loads(json.dumps(comparison_object(_compared(setting, layout)), allow_nan=False))
    assert told["schema"] == 1
    assert {"rank", "seconds", "predicted", "dry_run"} <= told.keys()
    for side in (told["predicted"], told["dry_run"]):
        assert isinstance(side["peak_bytes"], int)
        assert set(side["memory_bytes"]) == set(TENSORS)
        assert sum(side["memory_bytes"].values()) == side["peak_bytes"]
        assert {"flops", "parameter_bytes", "gradient_bytes", "optimizer_bytes"} <= side.keys()
        assert all({"kind", "group", "count", "bytes"} <= message.keys() for message in side["collectives"])
    assert next(m["group"] for m in told["dry_run"]["collectives"] if m["dimensions"] == ["pp"]) == [0, 2, 4, 6]
    assert told["dry_run"]["largest"][0]["module"] == "head"
    assert told["on_device"]["fits"] is True


def test_groups_of_the_same_ranks_are_one() -> None:
    layout = Layout(dp=2, dp_shard=2, zero=1)
    setting = setting_for(layout)
    run = a_run(layout, setting, 0)
    # torch has no group of its own for a dimension that is the world: a dry run names the world's messages so.
    world = [replace(m, group="dp_shard") if m.group == "world" else m for m in run.run.messages]
    compared = compare(setting, layout, replace(run, run=replace(run.run, messages=tuple(world))))
    for side in (compared.predicted, compared.found):
        assert [(t.ranks, t.kind) for t in side.traffic] == [
            ((0, 1), kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")
        ]
        assert all(t.count for t in side.traffic)
    assert {t.kind: (t.count, t.n_bytes) for t in compared.predicted.traffic} == {
        t.kind: (t.count, t.n_bytes) for t in compared.found.traffic
    }


def _compared(setting: Setting, layout: Layout) -> DryComparison:
    return compare(setting, layout, a_run(layout, setting, 0))


def config_for(**changes: object) -> TrainConfig:
    config = TrainConfig(
        model=find_model("tiny"),
        workload=Workload(seq_len=64, global_batch=1),
        layout=Layout(),
        cluster="atlas-800t-a2",
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def test_the_setting_is_that_of_the_config() -> None:
    found = setting_of(config_for(cluster="dgx-h100"))
    assert found.known
    assert found.notes == ()
    assert (found.setting.cluster.name, found.setting.calibration.name) == ("dgx-h100", calibration_of("h100-80g").name)


def test_a_config_without_cluster_is_taken_to_be_for_the_searchs_default() -> None:
    found = setting_of(config_for(cluster=""))
    assert found.known
    assert found.setting.cluster.name == "atlas-800t-a2"
    assert "names no cluster" in found.notes[0]


def test_a_cluster_that_is_not_here_leaves_open_what_the_device_has() -> None:
    found = setting_of(config_for(cluster="my-own-a2"))
    assert not found.known
    assert "my-own-a2" in found.notes[0]
    told = comparison_object(compare(found.setting, Layout(), a_run(Layout(), found.setting, 0), known=False))
    assert told["on_device"] is None


def test_a_plan_of_another_version_is_refused() -> None:
    plan = PlanSummary(version="titan-plan 0.0.1", layout=Layout().name, step_time_s=1.0, peak_bytes=1)
    with pytest.raises(TitanPlanError, match=r"0\.0\.1") as raised:
        check_version(config_for(plan=plan))
    assert raised.value.code == "C627"
    assert "delete the section `plan`" in raised.value.hint
    check_version(config_for(plan=replace(plan, version=tool_name())))
    check_version(config_for())


def test_a_file_that_was_edited_after_planning_is_noted() -> None:
    plan = PlanSummary(version=tool_name(), layout="tp8-pp1-dp1-mbs1-z0", step_time_s=1.0, peak_bytes=1)
    (note,) = setting_of(config_for(plan=plan)).notes
    assert "tp8-pp1-dp1-mbs1-z0" in note
    assert Layout().name in note
