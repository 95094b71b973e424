"""Rows of a run table: what each dialect is read to, what empty cells are taken for, and what is refused."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from cost_models.catalog import find_model
from cost_models.errors import TitanPlanError
from planner.run_table import Refusal, Run, read_row, read_run_table

SAMPLE = Path(__file__).parents[1] / "data" / "runs.csv"
GPT = {
    "model": "GPT",
    "hidden": "4096",
    "layers": "32",
    "heads": "32",
    "seq": "2048",
    "device": "A100-80G",
    "n_devices": "16",
    "tp": "4",
    "pp": "2",
    "micro_batch": "2",
    "global_batch": "64",
}
NUMBERS = ("hidden", "layers", "heads", "seq", "n_devices", "tp", "pp", "micro_batch", "global_batch")


def run_of(**cells: object) -> Run:
    run = read_row(GPT | {key: str(value) for key, value in cells.items()})
    assert isinstance(run, Run), run
    return run


def refusal_of(**cells: object) -> Refusal:
    refusal = read_row(GPT | {key: str(value) for key, value in cells.items()})
    assert isinstance(refusal, Refusal), refusal
    return refusal


def sample() -> list[tuple[dict[str, str], Run | Refusal]]:
    with SAMPLE.open(newline="", encoding="utf-8") as file:
        return list(zip(csv.DictReader(file), read_run_table(SAMPLE).runs, strict=True))


@pytest.mark.parametrize(("row", "run"), [pytest.param(*pair, id=pair[0]["id"]) for pair in sample()])
def test_each_dialect_is_read_to_its_program_and_layout(row: dict[str, str], run: Run | Refusal) -> None:
    if row["expected_status"] == "incomplete":
        assert isinstance(run, Refusal)
        return
    assert isinstance(run, Run)
    assert (run.stack.name, run.layout.name) == (row["expected_stack"], row["expected_layout"])


def test_empty_cells_take_the_documented_defaults() -> None:
    run = run_of()
    model, layout, workload = run.model, run.layout, run.workload
    assert (model.n_kv_heads, model.head_dim, model.ffn_dim, model.vocab_size) == (32, 128, 4 * 4096, 50257)
    assert (model.gated_mlp, model.norm, model.position, model.positions) == (False, "layernorm", "learned", 2048)
    assert (model.mlp_bias, model.tied_embeddings, model.moe, model.mla) == (True, True, None, None)
    assert (layout.dp, layout.cp, layout.ep, layout.vpp, layout.zero, layout.recompute) == (2, 1, 1, 1, 0, "none")
    assert (layout.schedule, layout.sp, layout.accumulation) == ("1f1b", True, 16)
    assert (workload.precision, workload.fused_attention, workload.dropout) == ("bf16", False, True)
    assert (run.stack.name, run.memory_quantity, run.notes) == ("megatron", "allocated", ())


def test_a_width_that_is_not_four_times_hidden_means_a_gated_mlp() -> None:
    run = run_of(ffn=11008)
    assert (run.model.gated_mlp, run.model.norm, run.model.position) == (True, "rmsnorm", "rope")
    assert (run.model.mlp_bias, run.model.tied_embeddings, run.model.vocab_size) == (False, False, 32000)
    assert (run.workload.dropout, run.workload.fused_attention) == (False, True)
    assert run_of(gated_mlp=1).model.ffn_dim == 11008


def test_a_catalogue_model_fills_in_what_the_row_leaves_out() -> None:
    named = {"model": "LLAMA3-70B", "hidden": "", "layers": "", "heads": ""}
    assert run_of(**named).model.total_params == find_model("llama3.1-70b").total_params
    shortened = run_of(model="llama3-70b (12 layers)", hidden=8192, layers=12, heads=64)
    assert (shortened.model.n_kv_heads, shortened.model.n_layers) == (8, 12)


def test_a_row_whose_numbers_contradict_the_catalogue_keeps_its_own() -> None:
    assert run_of(model="LLAMA3-70B").model.n_kv_heads == 32
    refused = refusal_of(model="LLAMA3-70B", hidden="", heads=48)
    assert refused.cause == "hidden is empty"


def test_mla_and_shared_experts_come_from_the_catalogue_or_the_options() -> None:
    experts = {"moe_experts": 160, "moe_topk": 6, "moe_ffn": 1536, "gated_mlp": 1, "tp": 1, "ep": 4, "pp": 1}
    known = run_of(model="somebody's", hidden=5120, layers=4, heads=128, **experts).model
    assert known.mla == find_model("deepseek-v2").mla
    assert known.moe is not None
    assert (known.moe.shared_ffn_dim, known.moe.dense_layers) == (3072, 1)
    flags = "q-lora-rank=1024; kv-lora-rank=512; first-k-dense-replace=2; n-shared-experts=1"
    told = run_of(other_flags=flags, **experts).model
    assert told.mla is not None
    assert (told.mla.q_lora_rank, told.mla.kv_lora_rank, told.mla.v_head_dim) == (1024, 512, 128)
    assert told.moe is not None
    assert (told.moe.shared_ffn_dim, told.moe.dense_layers) == (1536, 2)


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("", "bf16"),
        ("fp16 (mixed precision)", "fp16"),
        ("bfloat16", "bf16"),
        ("FP8-MX", "fp8"),
        ("MXFP8", "fp8"),
        ("fp8 mixed", "fp8"),
        ("current scaling; brackets = FP8-MX", "fp8"),
        ("NVFP4", "fp8"),
        ("fp32", "fp32"),
    ],
)
def test_precisions_in_all_their_spellings(text: str, precision: str) -> None:
    assert run_of(precision=text, device="H100-80G").workload.precision == precision


@pytest.mark.parametrize(
    ("text", "zero", "shard"),
    [
        ("", 0, 1),
        ("0", 0, 1),
        ("2", 2, 16),
        ("zero3", 3, 16),
        ("zero2 (paper text)", 2, 16),
        ("zero1/none DeepSpeed-3D", 1, 16),
        ("DeepSpeed zero0", 0, 1),
        ("zero1 (shard group all DP)", 1, 16),
        ("zero1=-1 (all DP)", 1, 16),
        ("zero1 (shard group 4)", 1, 4),
        ("distopt(zero1)", 1, 16),
        ("parallel_optimizer(zero)", 1, 16),
        ("bf16-optimizer (zero1-like, fp32 grad accumulation not sharded)", 1, 16),
        ("fsdp-full(zero3)", 3, 16),
        ("fsdp-grad-op(zero2)", 2, 16),
        ("megatron-FSDP(group 8)", 3, 8),
        ("FSDP without reshard-after-forward (zero2-like)", 2, 16),
    ],
)
def test_zero_in_all_its_spellings(text: str, zero: int, shard: int) -> None:
    layout = run_of(tp=1, pp=1, zero_stage_or_distopt=text).layout
    assert (layout.zero, layout.dp_shard) == (zero, shard)


def test_one_rank_has_nothing_to_shard() -> None:
    layout = run_of(tp=8, pp=2, zero_stage_or_distopt="distopt(zero1)").layout
    assert (layout.dp, layout.zero, layout.dp_shard) == (1, 0, 1)


def test_recomputed_layers_beyond_a_stage_are_all_of_them() -> None:
    assert run_of(recompute="layers=15").layout.recompute_text == "layers=15"
    assert run_of(recompute="layers=16").layout.recompute_text == "full"
    assert run_of(recompute="layers=0").layout.recompute_text == "none"
    per_rank = run_of(recompute="layers=4", vpp=2, other_flags="enable-recompute-layers-per-pp-rank").layout
    assert per_rank.recompute_layers == 2


def test_exactly_two_missing_layers_leave_the_ends_short() -> None:
    layout = run_of(layers=30, tp=1, pp=16, dp=1).layout
    assert (layout.short_first, layout.short_last) == (1, 1)
    assert run_of(layers=29, tp=1, pp=16, dp=1).layout.short_first == 0


def test_two_of_micro_batch_accumulation_and_global_batch_are_enough() -> None:
    by_steps = run_of(global_batch="", accumulation=16)
    assert (by_steps.workload.global_batch, by_steps.layout.accumulation) == (64, 16)
    assert run_of(micro_batch="", accumulation=16).layout.micro_batch == 2
    assert refusal_of(micro_batch="").reason == "micro_batch is empty"


def test_a_cluster_takes_the_node_size_and_network_of_the_row() -> None:
    cluster = run_of(devices_per_node=4, inter_node_gb_per_s_per_device=12.5).cluster
    assert cluster.devices_per_node == 4
    assert cluster.tiers[-1].link_bandwidth_bytes_per_s == 12.5e9


@pytest.mark.parametrize(
    "text", ["eight", "-1", "0", "nan", "inf", "1e400", "2.5", "1_0", "0x10", "1,024", "١٢x", "8 8"]
)
@pytest.mark.parametrize("column", NUMBERS)
def test_a_broken_number_names_its_column_and_what_was_got(column: str, text: str) -> None:
    refusal = refusal_of(**{column: text})
    assert refusal.status == "incomplete"
    assert refusal.reason.startswith(f"{column} is {text!r}; a whole number")


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("sp", "maybe"),
        ("flash_attention", "2"),
        ("precision", "int8"),
        ("recompute", "some"),
        ("recompute", "layers=[1,,2]"),
        ("schedule", "dualpipe"),
        ("zero_stage_or_distopt", "banana"),
        ("stack", "jax"),
        ("memory_quantity", "reserved"),
        ("activation_offload", "maybe"),
        ("swap_optimizer", "2"),
        ("reduce_gradients", "never"),
        ("placement", "pp-tp"),
        ("dp_shard", "0"),
        ("zero", "banana"),
        ("cp_kind", "star"),
        ("short_first", "-1"),
        ("short_last", "1.5"),
        ("optimizer", "lion"),
        ("inter_node_gb_per_s_per_device", "-3"),
        ("device", "abacus"),
        ("kv_heads", "5"),
        ("heads", "33"),
        ("n_devices", "20"),
        ("dp", "3"),
        ("tp", "100001"),
        ("devices_per_node", "99999999"),
    ],
)
def test_an_unknown_word_or_number_names_what_was_got(column: str, text: str) -> None:
    refusal = refusal_of(**{column: text})
    assert refusal.status == "incomplete"
    assert text in refusal.reason


def test_pandas_floats_are_whole_numbers() -> None:
    assert run_of(tp="4.0", sp="1.0", hidden="4096.0") == run_of(tp=4, sp=1)


@pytest.mark.parametrize("text", ["", "\n\n", "a,b\n1,2\n", "tp,tp\n1,2\n", 'tp\n"\0"\n', "tp,pp\n" + "x" * 200_000])
def test_a_text_that_is_no_run_table_is_bad_input(text: str) -> None:
    with pytest.raises(TitanPlanError) as caught:
        read_run_table(text)
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_a_file_that_cannot_be_read_is_bad_input(tmp_path: Path) -> None:
    binary = tmp_path / "runs.csv"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    for path in (binary, tmp_path, tmp_path / "missing.csv", Path("bad\0name")):
        with pytest.raises(TitanPlanError) as caught:
            read_run_table(path)
        assert caught.value.exit_code == 2


def test_short_rows_are_padded_and_long_ones_refused() -> None:
    table = read_run_table("device,tp,note\nA100-80G\nA100-80G,1,a,b\n")
    assert table.rows == (("A100-80G", "", ""), ("A100-80G", "1", "a"))
    long = table.runs[1]
    assert isinstance(long, Refusal)
    assert "4 cells" in long.reason


def test_the_words_of_a_plan_table_name_its_layout() -> None:
    plan = {"zero": 3, "dp_shard": 4, "reduce_gradients": "every", "placement": "tp-cp-pp-dp", "optimizer": "sgd"}
    run = run_of(tp=1, dp=8, **plan)
    layout = run.layout
    assert (layout.zero, layout.dp_shard, layout.reduce_gradients) == (3, 4, "every")
    assert (layout.placement, run.workload.optimizer) == ("tp-cp-pp-dp", "sgd")
    assert run_of(tp=1, cp=2, cp_kind="Ulysses").layout.cp_kind == "ulysses"
    assert run_of(cp_kind="none").layout.cp_kind == "none"
    assert "cp 2 has a kind" in refusal_of(tp=1, cp=2, cp_kind="none").reason


@pytest.mark.parametrize(("text", "on"), [("1", True), ("true", True), ("True", True), ("0", False), ("false", False)])
@pytest.mark.parametrize("flag", ["swap_optimizer", "activation_offload"])
def test_a_flag_goes_before_the_options(flag: str, text: str, on: bool) -> None:
    option = {"swap_optimizer": "swap-optimizer", "activation_offload": "act_cpu_offload=true"}[flag]
    assert getattr(run_of(**{flag: text}).layout, flag) is on
    assert getattr(run_of(**{flag: text}, other_flags=option).layout, flag) is on
    assert getattr(run_of(other_flags=option).layout, flag) is True
    assert getattr(run_of().layout, flag) is False


def test_zero_is_read_where_the_older_column_is_empty() -> None:
    assert run_of(zero=2).layout.zero == 2
    assert run_of(zero=2, zero_stage_or_distopt="distopt(zero1)").layout.zero == 1
    assert run_of(tp=1, zero_stage_or_distopt="zero1 (shard group 4)", dp_shard=2).layout.dp_shard == 2


def test_short_stages_are_taken_as_given() -> None:
    def short(**cells: object) -> tuple[int, int]:
        layout = run_of(tp=1, pp=16, dp=1, **cells).layout
        return layout.short_first, layout.short_last

    assert short(layers=30) == (1, 1)
    assert short(layers=30, short_first=2) == (2, 0)
    assert short(layers=30, short_last=2) == (0, 2)
    assert short(layers=32, short_first=0, short_last=0) == (0, 0)
    assert (short(layers=31), short(layers=31, stack="titan")) == ((0, 0), (0, 1))


def test_defaults_fill_empty_and_missing_cells_only() -> None:
    filled = {"model": "tiny", "device": "A100-80G", "seq": "512", "global_batch": "16", "stack": "titan"}
    table = read_run_table("tp,dp,micro_batch,seq,hardware\n1,8,1,,\n1,8,1,256,H100-80G\n", filled)
    first, second = table.runs
    assert isinstance(first, Run)
    assert isinstance(second, Run)
    assert (first.workload.seq_len, second.workload.seq_len) == (512, 256)
    assert "h100" in second.cluster.device.name.lower()
    assert "a100" in first.cluster.device.name.lower()
    assert (first.model.name, first.stack.name, first.n_devices) == ("tiny", "titan", 8)


def test_columns_that_are_not_read_are_known() -> None:
    table = read_run_table("tp,Color, my  note ,Color,,step_time_s,rank\n")
    assert table.ignored == ("Color", "my note", "rank")
    assert table.measured == ("step_time_s",)
    plans = read_run_table("tp,step_time_s,step_time_low_s\n")
    assert (plans.ignored, plans.measured) == (("step_time_s", "step_time_low_s"), ())
