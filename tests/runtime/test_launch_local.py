"""Scaling a plan down: any valid layout stays valid, fits the ranks, and keeps what it was about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster, find_model
from cost_models.errors import TitanPlanError
from cost_models.layout import PLACEMENTS, Layout
from cost_models.rules import violation
from cost_models.setting import Setting
from cost_models.stack import TITAN
from cost_models.workload import OPTIMIZER_STATE_BYTES, Workload
from runtime.config import NumericsOptions, TrainConfig, config_text, load_config, parse_config
from runtime.device import Devices
from runtime.launch_local import DROP_ORDER, STEPS, scale_down, write_scaled_down

CPU = Devices(kind="cpu", backend="gloo", count=2, memory_bytes=2**35)
SCHEDULES = {1: ("gpipe", "1f1b", "zero-bubble"), 2: ("interleaved", "zb-v", "zero-bubble"), 5: ("interleaved",)}
CLUSTERS = {"npu": "atlas-800t-a2", "cpu": "local"}


def broken(config: TrainConfig, kind: str) -> object:
    """The first rule that a config breaks, asked of the rules themselves."""
    setting = Setting(
        model=config.model,
        workload=config.workload,
        cluster=find_cluster(CLUSTERS[kind]),
        stack=TITAN,
        calibration=calibration_of("local-cpu"),
        n_devices=config.layout.devices,
    )
    return violation(setting, config.layout)


@st.composite
def plans(draw: st.DrawFn) -> TrainConfig:
    """Valid plans of a dense and a sparse model, every field of a layout among them."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731 - as short as the table it draws
    model = find_model(pick("llama2-70b", "mixtral-8x7b"))
    tp, cp, pp, dp = pick(1, 2, 4, 8), pick(1, 1, 2, 4), pick(1, 2, 4), pick(1, 2, 4, 8)
    vpp = pick(1, 2, 2) if pp > 1 else 1
    zero = pick(0, 1, 2, 3) if dp * cp > 1 else 0
    shard = (pick(*(n for n in (1, 2, 4, 8) if dp % n == 0)) if zero else 1) if cp > 1 or not zero else pick(dp, dp, 2)
    accumulation = pick(1, 2, 3, 4, 8, 16)
    short = (pick(0, 0, 1), pick(0, 0, 1)) if pp > 1 else (0, 0)
    recompute = pick("none", "selective", "full")
    layout = Layout(
        tp=tp, sp=tp > 1 and pick(True, True, False), cp=cp,
        cp_kind=pick("ulysses", "allgather", "ring") if cp > 1 else "none",
        ep=pick(1, 2, 4, 8) if model.moe else 1, pp=pp, vpp=vpp, dp=dp, dp_shard=shard, zero=zero,
        micro_batch=pick(1, 2, 8), accumulation=accumulation,
        schedule=pick(*SCHEDULES[vpp]) if pp > 1 else "none", recompute=recompute,
        recompute_layers=pick(0, 1, 3) if recompute == "full" else 0,
        reduce_gradients=pick("last", "every") if zero > 1 and accumulation > 1 else "last",
        swap_optimizer=draw(st.booleans()), activation_offload=draw(st.booleans()), placement=pick(*PLACEMENTS),
        short_first=short[0], short_last=short[1],
    )  # fmt: skip
    stages = pp * vpp
    each = -(-model.n_layers // stages)
    model = replace(model, n_layers=each * stages - sum(short))
    workload = Workload(
        seq_len=4096,
        global_batch=layout.micro_batch * accumulation * dp,
        precision=pick("bf16", "fp16", "fp32"),
        optimizer=pick(*OPTIMIZER_STATE_BYTES),
    )
    config = TrainConfig(
        model=model, workload=workload, layout=layout, cluster="atlas-800t-a2", numerics=NumericsOptions(compile=True)
    )
    assume(broken(config, "npu") is None)
    return config


@given(plan=plans(), ranks=st.integers(1, 300), kind=st.sampled_from(["cpu", "npu"]))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_any_valid_plan_stays_valid_and_fits_the_ranks(plan: TrainConfig, ranks: int, kind: str) -> None:
    scaled = scale_down(plan, ranks, kind=kind).config
    layout, full = scaled.layout, plan.layout
    assert broken(scaled, kind) is None
    assert layout.devices <= min(ranks, 8)
    for name in ("tp", "cp", "pp", "dp", "ep", "vpp", "dp_shard"):
        assert getattr(layout, name) in {1, min(2, getattr(full, name))}
    kept = ("swap_optimizer", "activation_offload", "recompute", "placement")
    assert [getattr(layout, name) for name in kept] == [getattr(full, name) for name in kept]
    assert scaled.workload.optimizer == plan.workload.optimizer
    assert scaled.workload.precision == ("fp32" if plan.workload.precision == "fp32" else "bf16")
    assert (scaled.training.max_steps, scaled.workload.seq_len, scaled.training.dataset.name) == (STEPS, 128, "demo")
    assert (scaled.model.moe is None) == (plan.model.moe is None)


@given(plan=plans(), ranks=st.integers(1, 8))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_no_dimension_is_dropped_that_would_have_fitted(plan: TrainConfig, ranks: int) -> None:
    scaled = scale_down(plan, ranks)
    layout, full = scaled.config.layout, plan.layout
    lost = [name for name in DROP_ORDER if getattr(full, name) > 1 and getattr(layout, name) == 1]
    many = [name for name in DROP_ORDER if getattr(full, name) > 1]
    assert lost == many[: len(lost)]
    assert not lost or layout.devices * 2 > ranks
    assert [note.split()[0] for note in scaled.notes if "dropped" in note] == lost
    if not lost:
        assert layout.zero == full.zero
        assert layout.schedule == full.schedule
        assert layout.reduce_gradients == full.reduce_gradients


@given(plan=plans())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_what_is_written_reads_back(plan: TrainConfig) -> None:
    import yaml

    scaled = scale_down(plan, 8).config
    read = parse_config(yaml.safe_load(config_text(scaled)), "config.yaml")
    assert replace(read, overrides=()) == scaled  # more layers than `tiny` of the catalogue are told as a change


def plan_file(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    return folder


GUIDE = """\
model: {name: LLaMA, size: 70B}
training: {batch_size: 256, micro_batch_size: 1, epochs: 3, warmup_steps: 1000, dataset: {name: other, path: /d}}
distributed: {tp_size: 4, pp_size: 4, dp_size: 4}
optimization: {gradient_checkpointing: true, zero_stage: 2}
cluster: atlas-800t-a2
"""


def test_the_guides_plan_on_two_cores(tmp_path: Path) -> None:
    path, scaled = write_scaled_down(plan_file(tmp_path / "a b ü", GUIDE), CPU)
    assert path == tmp_path / "a b ü" / "local" / "config.yaml"
    assert load_config(path) == scaled.config
    assert scaled.config.layout.name == "tp2-pp2-dp2-mbs1-z2-full"
    assert scaled.config.training.output_dir == str(path.parent / "output")
    assert (scaled.config.training.epochs, scaled.config.training.warmup_steps) == (None, 5)
    assert not scaled.config.training.checkpoint.resume
    assert scaled.config.plan is None
    assert "tp 4 -> 2" in scaled.notes
    assert any("llama2-70b -> tiny" in note for note in scaled.notes)


def test_with_few_ranks_dp_goes_first_and_zero_with_it() -> None:
    config = parse_config({**dict(_yaml(GUIDE))}, "config.yaml")
    four, two, one = (scale_down(config, ranks) for ranks in (4, 2, 1))
    assert four.config.layout.name == "tp2-pp2-dp1-mbs1-z0-full"
    assert "dp 4 dropped: 4 ranks do not hold all dimensions" in four.notes
    assert "ZeRO-2 -> 0: no rank to shard over" in four.notes
    assert two.config.layout.name == "tp1-pp2-dp1-mbs1-z0-full"
    assert one.config.layout.name == "tp1-pp1-dp1-mbs1-z0-full"


def _yaml(text: str) -> dict[str, object]:
    import yaml

    return dict(yaml.safe_load(text))


def test_a_machine_that_carries_no_rank_says_how_to_rehearse_on_its_cpu(tmp_path: Path) -> None:
    none = Devices(kind="npu", backend="hccl", count=0)
    with pytest.raises(TitanPlanError) as caught:
        write_scaled_down(plan_file(tmp_path, GUIDE), none)
    assert (caught.value.code, caught.value.hint) == ("R720", "TITAN_PLAN_DEVICE=cpu rehearses on the CPU")
    assert not (tmp_path / "local").exists()


def test_a_plan_that_breaks_a_rule_is_not_rehearsed(tmp_path: Path) -> None:
    with pytest.raises(TitanPlanError, match="D202"):
        write_scaled_down(plan_file(tmp_path, GUIDE.replace("tp_size: 4", "tp_size: 5")), CPU)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    plan_file(tmp_path, GUIDE)
    (tmp_path / "local").write_text("in the way", encoding="utf-8")
    with pytest.raises(TitanPlanError, match="C603"):
        write_scaled_down(tmp_path, CPU)
