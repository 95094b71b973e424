"""config.yaml: what is read, derived and refused, in which words, and that writing and reading agree."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.catalog import find_model, list_models
from cost_models.errors import TitanPlanError
from cost_models.layout import PLACEMENTS, REDUCTIONS, Layout
from cost_models.model import ModelSpec
from cost_models.model_files import ModelEntry
from cost_models.schedules import SCHEDULES
from cost_models.workload import OPTIMIZER_STATE_BYTES, PRECISIONS, Workload
from runtime.config import (
    CheckpointOptions,
    CommunicationOptions,
    DatasetOptions,
    NumericsOptions,
    PlanSummary,
    TrainConfig,
    TrainingOptions,
    config_text,
    load_config,
    parse_config,
)

GUIDE = Path(__file__).parents[2] / "configs" / "examples" / "llama70b-64npu-guide.yaml"
TINY = {"model": {"name": "tiny"}}


def guide() -> dict[str, Any]:
    return dict(yaml.safe_load(GUIDE.read_text(encoding="utf-8")))


def read(values: dict[str, Any], *sets: str, world_size: int | None = None) -> TrainConfig:
    return parse_config(values, "config.yaml", sets, world_size=world_size)


def refused(values: dict[str, Any], *sets: str, world_size: int | None = None) -> TitanPlanError:
    with pytest.raises(TitanPlanError) as caught:
        read(values, *sets, world_size=world_size)
    assert caught.value.exit_code == 2
    return caught.value


def test_the_guides_file_is_read() -> None:
    config = load_config(GUIDE)
    assert config.model == find_model("llama2-70b")
    assert (config.model.n_kv_heads, config.model.ffn_dim) == (8, 28672)
    assert config.overrides == ()
    assert config.workload == Workload(seq_len=4096, global_batch=256)
    assert config.layout == Layout(
        tp=4, sp=True, pp=4, dp=4, dp_shard=4, zero=2, accumulation=64, schedule="1f1b", recompute="full"
    )
    assert (config.training.lr, config.training.warmup_steps, config.training.max_steps) == (1e-4, 1000, 100_000)
    assert config.world_size == 64
    assert config.plan is None


def test_the_guides_printed_accumulation_is_refused_with_the_right_one() -> None:
    error = refused(guide(), "training.gradient_accumulation_steps=8")
    assert error.code == "B501"
    assert "micro_batch_size 1 x gradient_accumulation_steps 8 x dp_size 4 = 32, batch_size is 256" in error.message
    assert error.hint.startswith("gradient_accumulation_steps would have to be 64 (256 / (1 x 4) = 64)")


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (("training.batch_size=256", "training.micro_batch_size=2"), (2, 32, 256)),
        (("training.batch_size=256", "training.gradient_accumulation_steps=8"), (8, 8, 256)),
        (("training.micro_batch_size=2", "training.gradient_accumulation_steps=8"), (2, 8, 64)),
        (("training.batch_size=256",), (1, 64, 256)),
        ((), (1, 1, 4)),
    ],
)
def test_a_missing_batch_size_is_derived(sets: tuple[str, ...], expected: tuple[int, int, int]) -> None:
    config = read(TINY, "distributed.dp_size=4", *sets)
    assert (config.layout.micro_batch, config.layout.accumulation, config.workload.global_batch) == expected


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("training.batch_size=250",), "batch_size would have to be 248 or 252"),
        (("training.batch_size=3",), "batch_size would have to be 4"),
        (("training.batch_size=10", "training.gradient_accumulation_steps=2"), "8 or 16"),
        (
            ("training.batch_size=250", "training.micro_batch_size=1", "training.gradient_accumulation_steps=64"),
            "batch_size would have to be 256, or a multiple of 1 x 4 such as 248 or 252",
        ),
    ],
)
def test_a_batch_that_does_not_split_names_near_ones(sets: tuple[str, ...], words: str) -> None:
    error = refused(TINY, "distributed.dp_size=4", *sets)
    assert error.code == "B501"
    assert words in error.hint


def test_data_parallelism_follows_from_the_devices() -> None:
    values = guide()
    del values["distributed"]["dp_size"], values["training"]["gradient_accumulation_steps"]
    assert read(values, world_size=128).layout.dp == 8
    assert read(values, "cluster.devices=32").layout.dp == 2
    assert read(values, "training.gradient_accumulation_steps=128").layout.dp == 2  # 256 / (1 x 128)
    assert read(values).layout.dp == 1
    assert read(values, "cluster.devices=32", world_size=16).layout.dp == 1


def test_degrees_that_are_not_the_devices_show_the_product_and_the_right_one() -> None:
    error = refused(guide(), world_size=32)
    assert error.code == "T310"
    assert "tp_size 4 x pp_size 4 x dp_size 4 = 64, the run has 32 devices" in error.message
    assert "dp_size would have to be 2 (32 / 16 = 2)" in error.hint
    assert "16 does not divide 40" in refused(guide(), world_size=40).hint
    assert "the cluster section names 128 devices" in refused(guide(), "cluster.devices=128").message
    assert refused(guide(), world_size=0).code == "T301"


def test_defaults_follow_from_what_is_given() -> None:
    plain = read(TINY)
    assert plain.layout == Layout()
    assert plain.workload == Workload(seq_len=128, global_batch=1)
    assert (plain.training.max_steps, plain.training.epochs) == (1000, None)
    assert read(TINY, "training.epochs=3").training.max_steps is None
    wide = read(TINY, "distributed.tp_size=2", "distributed.cp_size=2", "distributed.dp_size=2").layout
    assert (wide.sp, wide.cp_kind, wide.dp_shard, wide.schedule) == (True, "allgather", 1, "none")
    deep = read(TINY, "distributed.pp_size=2", "distributed.dp_size=2", "optimization.zero_stage=1").layout
    assert (deep.schedule, deep.dp_shard) == ("1f1b", 2)
    assert read(TINY, "distributed.pp_size=2", "distributed.virtual_pp_size=2").layout.schedule == "interleaved"
    assert not read(TINY, "distributed.tp_size=2", "distributed.sequence_parallel=false").layout.sp


@pytest.mark.parametrize(
    ("given", "expected"),
    [("false", ("none", 0)), ("true", ("full", 0)), ("full", ("full", 0)), ("Selective", ("selective", 0)),
     ("none", ("none", 0)), ("4", ("full", 4)), ("layers=4", ("full", 4)), ("1", ("full", 1)), ("", ("none", 0))],
)  # fmt: skip
def test_gradient_checkpointing_has_many_forms(given: str, expected: tuple[str, int]) -> None:
    layout = read(TINY, f"optimization.gradient_checkpointing={given}").layout
    assert (layout.recompute, layout.recompute_layers) == expected


@pytest.mark.parametrize("value", ["1e-4", "'1e-4'", "0.0001", "1.0e-04"])
def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path, value: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{name: tiny}}\ntraining: {{lr: {value}, max_steps: 1e5}}\n", encoding="utf-8")
    assert (load_config(path).training.lr, load_config(path).training.max_steps) == (1e-4, 100_000)


@pytest.mark.parametrize("key", ["tp_size", "cp_size", "ep_size", "pp_size", "virtual_pp_size", "dp_size"])
@pytest.mark.parametrize(
    ("value", "code"),
    [(0, "C610"), (-4, "C610"), (1.5, "C606"), (True, "C606"), ("four", "C606"), ([4], "C606"), ("1e30", "C610"),
     (10**400, "C610"), ({}, "C606"), (float("inf"), "C606"), (float("nan"), "C606")],
)  # fmt: skip
def test_what_is_no_degree_is_named_with_its_key(key: str, value: object, code: str) -> None:
    error = refused({**TINY, "distributed": {key: value}})
    assert error.code == code
    assert error.message.startswith(f"config.yaml: distributed.{key} is ")
    assert error.hint


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        ("training.lr=0", "C610", "greater than 0"),
        ("training.lr=-1e-4", "C610", "greater than 0"),
        ("training.lr=fast", "C606", "a number"),
        ("training.batch_size=0", "C610", "greater than or equal to 1"),
        ("training.max_steps=0", "C610", "greater than or equal to 1"),
        ("training.seed=-1", "C610", "greater than or equal to 0"),
        ("training.optimizer=lion", "C611", "adamw, adam, sgd"),
        ("training.dataset=3", "C606", "key: value"),
        ("training=3", "C606", "key: value"),
        ("optimization.precision=bf61", "C611", "bf16, fp16, fp32, fp8"),
        ("optimization.zero_stage=4", "C610", "less than or equal to 3"),
        ("optimization.zero_stage=-1", "C610", "greater than or equal to 0"),
        ("optimization.zero_stage=true", "C606", "a whole number"),
        ("optimization.gradient_checkpointing=some", "C611", "selective"),
        ("optimization.gradient_checkpointing=0", "C611", "selective"),
        ("optimization.loss_scale=0", "C610", "greater than 0"),
        ("optimization.loss_scale=big", "C606", "dynamic"),
        ("optimization.gradient_clip=-1", "C610", "greater than or equal to 0"),
        ("optimization.compile=1", "C606", "true or false"),
        ("distributed.pp_schedule=dualpipe", "C611", "1f1b"),
        ("distributed.cp_kind=zigzag", "C611", "ulysses"),
        ("distributed.placement=dp-tp", "C611", "tp-cp-dp-pp"),
        ("distributed.stage_layers=20", "C606", "a list"),
        ("cluster=[1]", "C606", "key: value"),
        ("plan.version=1", "C608", "section"),
        ("model=tiny", "C606", "key: value"),
    ],
)
def test_wrong_values_are_told(setting: str, code: str, words: str) -> None:
    error = refused(TINY, setting)
    assert error.code == code
    assert setting.partition("=")[0].partition(".")[0] in error.message
    assert words in error.hint


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("distributed.tpsize=4", "tp_size"),
        ("distributed.sequence_paralel=true", "sequence_parallel"),
        ("training.tp_size=4", "tp_size belongs to section distributed"),
        ("training.dataset.nam=demo", "name"),
        ("training.zero_stage=1", "zero_stage belongs to section optimization"),
        ("model.n_layer=3", "n_layers"),
        ("trainin.lr=3", "did you mean training?"),
        ("lr=3", "lr belongs to section training"),
        ("zzz.lr=3", "known sections: model, training, distributed, optimization, cluster, plan"),
    ],
)
def test_unknown_keys_name_the_nearest_or_their_section(setting: str, hint: str) -> None:
    error = refused(TINY, setting)
    assert error.code == "C605"
    assert setting.partition("=")[0].rpartition(".")[2] in error.message or "section" in error.message
    assert hint in error.hint


def test_dimensions_beside_a_name_go_first_and_are_reported() -> None:
    config = read(guide(), "model.n_layers=40", "model.n_heads=128")
    assert (config.model.n_layers, config.model.n_kv_heads, config.model.head_dim) == (40, 8, 64)
    assert config.overrides == (
        "model.n_layers 40 instead of 80 of llama2-70b",
        "model.n_heads 128 instead of 64 of llama2-70b",
        "model.head_dim 64 instead of 128 of llama2-70b",
    )
    moe = read({"model": {"name": "mixtral-8x7b", "moe": {"top_k": 4}}}).model
    assert moe.moe is not None
    assert (moe.moe.experts, moe.moe.top_k) == (8, 4)
    assert read({"model": {"name": "mixtral-8x7b", "moe": None}}).model.moe is None


@pytest.mark.parametrize(
    "section", [{"name": "llama2-70b"}, {"size": "70B"}, {"name": "LLAMA 2", "size": "70b"}, {"name": "70B"}]
)
def test_a_model_may_be_named_in_many_ways(section: dict[str, str]) -> None:
    assert read({"model": section}).model == find_model("llama2-70b")


def test_a_model_may_be_given_by_dimensions() -> None:
    sizes = {"hidden_dim": 64, "n_layers": 2, "n_heads": 4, "ffn_dim": 128, "vocab_size": 512}
    assert read({"model": sizes}).model == ModelSpec(name="custom", n_kv_heads=4, head_dim=16, **sizes)
    assert read({"model": {"name": "mine", **sizes}}).model.name == "mine"
    del sizes["ffn_dim"]
    error = refused({"model": {"name": "mine", **sizes}})
    assert error.code == "C601"
    assert "describe it: ffn_dim missing" in error.hint
    assert refused({"model": sizes}).code == "C608"
    assert refused({}).code == "C608"


def test_a_model_may_be_a_config_json_beside_the_file(tmp_path: Path) -> None:
    shape = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 128, "vocab_size": 512}  # fmt: skip
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    path = tmp_path / "config.yaml"
    path.write_text("model: {hf_config: mine/config.json, n_layers: 3}\n", encoding="utf-8")
    config = load_config(path)
    assert (config.model.name, config.model.n_layers) == ("mine", 3)
    assert config.overrides == ("model.n_layers 3 instead of 2 of mine",)
    assert refused({"model": {"hf_config": "x", "size": "70B"}}).code == "C615"
    assert refused({"model": {"hf_config": "nowhere.json"}}).code == "C603"


@pytest.mark.parametrize(
    ("layers", "short"),
    [([20, 20, 20, 20], (0, 0)), ([19, 21, 21, 19], (2, 2)), ([17, 21, 21, 21], (4, 0))],
)
def test_stage_layers_are_short_first_and_last_stages(layers: list[int], short: tuple[int, int]) -> None:
    layout = read(guide(), f"distributed.stage_layers={layers}").layout
    assert (layout.short_first, layout.short_last) == short
    assert list(layout.stage_layers(80)) == layers


@pytest.mark.parametrize(
    ("layers", "words"),
    [([40, 40], "4 virtual stages"), ([20, 20, 20, 19], "sums to 79"), ([19, 20, 22, 19], "differ"),
     ([22, 18, 18, 22], "differ")],
)  # fmt: skip
def test_other_stages_are_refused_with_the_shapes_that_are_taken(layers: list[int], words: str) -> None:
    error = refused(guide(), f"distributed.stage_layers={layers}")
    assert error.code == "S404"
    assert words in error.message
    assert error.hint


def test_overrides_go_before_the_file_and_leave_it_as_it_is() -> None:
    values = guide()
    before = json.dumps(values)
    config = read(values, "training.lr=3e-4", "training.dataset.name=c4", "cluster=atlas-800t-a2")
    assert (config.training.lr, config.training.dataset.name, config.cluster) == (3e-4, "c4", "atlas-800t-a2")
    assert json.dumps(values) == before
    assert parse_config(values, "c", {"training.lr": 1.0}).training.lr == 1.0
    assert read(values, "training.gradient_accumulation_steps=", "training.batch_size=512").layout.accumulation == 128
    assert load_config(None, ["model.name=tiny"]).model.name == "tiny"


@pytest.mark.parametrize(
    ("item", "code"),
    [("training.lr", "C616"), ("=3", "C616"), ("training..lr=3", "C616"), ("training.lr.x=3", "C616"),
     ("training.lr=[", "C604")],
)  # fmt: skip
def test_a_malformed_override_is_told(item: str, code: str) -> None:
    error = refused(guide(), item)
    assert error.code == code
    assert error.hint


def test_broken_yaml_is_placed_by_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {name: tiny}\ntraining:\n  lr: 1\n   seed: 2\n", encoding="utf-8")
    with pytest.raises(TitanPlanError, match=r"config\.yaml:4:") as caught:
        load_config(path)
    assert caught.value.code == "C604"
    path.write_text("training: {lr: 1, lr: 2}\n", encoding="utf-8")
    with pytest.raises(TitanPlanError, match="lr is given twice"):
        load_config(path)
    with pytest.raises(TitanPlanError, match="no such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_newer_plan_may_say_more_and_a_broken_one_is_named() -> None:
    plan = {"version": "9.9", "layout": "tp1", "step_time_s": 1, "peak_bytes": 2, "colour": "blue"}
    found = read({**TINY, "plan": plan}).plan
    assert found == PlanSummary(version="9.9", layout="tp1", step_time_s=1.0, peak_bytes=2)
    assert "plan.step_time_s" in refused({**TINY, "plan": {**plan, "step_time_s": "soon"}}).message


degrees = st.sampled_from([1, 2, 3, 4, 8, 16])
counts = st.integers(1, 10**6)
numbers = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
names = st.text(max_size=12)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, Layout]:
    """A model and a layout, with every field of Layout drawn."""
    pp, vpp = draw(degrees), draw(st.sampled_from([1, 2, 4]))
    stages = pp * vpp
    # Of two stages only one can be short: [9, 9] says nothing of what was cut.
    first = draw(st.integers(0, 3)) if stages > 1 else 0
    last = draw(st.integers(0, 3)) if stages > 2 or (stages == 2 and not first) else 0
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    n_layers = stages * draw(st.integers(4, 9)) - first - last
    values: dict[str, Any] = {
        "tp": draw(degrees),
        "sp": draw(st.booleans()),
        "cp": draw(degrees),
        "cp_kind": draw(st.sampled_from(["none", "ulysses", "allgather", "ring"])),
        "ep": draw(degrees),
        "pp": pp,
        "vpp": vpp,
        "dp": draw(degrees),
        "dp_shard": draw(degrees),
        "zero": draw(st.integers(0, 3)),
        "micro_batch": draw(counts),
        "accumulation": draw(st.integers(1, 100)),
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "recompute": recompute,
        "recompute_layers": draw(st.integers(0, 8)) if recompute == "full" else 0,
        "reduce_gradients": draw(st.sampled_from(REDUCTIONS)),
        "swap_optimizer": draw(st.booleans()),
        "activation_offload": draw(st.booleans()),
        "placement": draw(st.sampled_from(PLACEMENTS)),
        "short_first": first,
        "short_last": last,
    }
    assert set(values) == {field.name for field in fields(Layout)}
    base = draw(st.sampled_from(list_models())).spec
    name = draw(st.sampled_from([base.name, "mine", "./mine.yaml", "雪 ☃"]))
    return replace(base, name=name, n_layers=n_layers), Layout(**values)


@settings(deadline=None)  # the first examples read the catalogue and import pydantic
@given(case=cases(), data=st.data())
def test_what_is_written_is_read_back_equal(case: tuple[ModelSpec, Layout], data: st.DataObject) -> None:
    model, layout = case
    config = TrainConfig(
        model=model,
        workload=Workload(
            seq_len=data.draw(counts),
            global_batch=layout.micro_batch * layout.accumulation * layout.dp,
            precision=data.draw(st.sampled_from(sorted(PRECISIONS))),
            optimizer=data.draw(st.sampled_from(sorted(OPTIMIZER_STATE_BYTES))),
            fused_attention=data.draw(st.booleans()),
            dropout=data.draw(st.booleans()),
            causal=data.draw(st.booleans()),
        ),
        layout=layout,
        training=data.draw(
            st.builds(
                TrainingOptions,
                lr=st.floats(min_value=1e-300, max_value=10),
                warmup_steps=counts,
                max_steps=counts,
                epochs=st.none() | counts,
                seed=counts,
                dataset=st.builds(DatasetOptions, name=names, path=names, tokenizer=names, text_key=names),
                output_dir=names,
                checkpoint=st.builds(CheckpointOptions, interval=st.integers(0, 99), keep=counts),
            )
        ),
        communication=data.draw(st.builds(CommunicationOptions, comm_algorithm=names)),
        numerics=data.draw(
            st.builds(NumericsOptions, gradient_clip=numbers, loss_scale=st.none() | st.floats(1e-300, 1e30))
        ),
        cluster=data.draw(names),
        plan=data.draw(
            st.none()
            | st.builds(
                PlanSummary,
                step_time_s=numbers,
                step_time_low_s=numbers,
                step_time_high_s=numbers,
                tokens_per_s_per_device=numbers,
                mfu=numbers,
                hfu=numbers,
                p_fits=numbers,
                memory_bytes=st.dictionaries(names, counts, max_size=2),
                time_s=st.dictionaries(names, numbers, max_size=2),
                communication_s=st.dictionaries(names, numbers, max_size=2),
                computing_s=st.dictionaries(names, numbers, max_size=2),
                inputs=st.dictionaries(names, names, max_size=2),
            )
        ),
    )
    text = config_text(config)
    assert replace(parse_config(yaml.safe_load(text), "config.yaml"), overrides=()) == config
    assert config_text(parse_config(yaml.safe_load(text), "config.yaml")) == text


@pytest.mark.parametrize("entry", list_models(), ids=lambda entry: entry.name)
def test_a_model_of_the_catalogue_is_written_with_its_name_and_its_dimensions(entry: ModelEntry) -> None:
    config = TrainConfig(model=entry.spec, workload=Workload(seq_len=1, global_batch=1), layout=Layout())
    section = yaml.safe_load(config_text(config))["model"]
    assert section["name"] == (entry.family if entry.size else entry.name)
    assert section["hidden_dim"] == entry.spec.hidden_dim
    again = read({"model": section})
    assert (again.model, again.overrides) == (entry.spec, ())
    nameless = {key: value for key, value in section.items() if key not in {"name", "size"}}
    assert replace(read({"model": nameless}).model, name=entry.spec.name) == entry.spec


def test_a_written_file_is_read_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config_text(load_config(GUIDE)), encoding="utf-8")
    assert load_config(path) == load_config(GUIDE)


@settings(deadline=None)
@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=5),
    st.sampled_from([f"{section}.{key}" for section, keys in guide().items() for key in keys]
                    + ["training", "model", "cluster", "plan", "training.dataset", "training.checkpoint",
                       "distributed.stage_layers", "plan.memory_bytes", "plan.inputs", "model.moe", "model.hf_config"]),
)  # fmt: skip
def test_no_value_of_any_key_crashes(value: object, key: str) -> None:
    with suppress(TitanPlanError):  # any other exception fails the test
        parse_config(guide(), "config.yaml", {key: value})


def test_importing_the_config_is_cheap() -> None:
    script = (
        "import sys, runtime.config; print([m for m in ('torch', 'pydantic', 'numpy', 'yaml') if m in sys.modules])\n"
        "runtime.config.load_config(sys.argv[1]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(GUIDE)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]
