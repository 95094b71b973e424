"""Defaults, names and what the search is not asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from cost_models.errors import TitanPlanError
from cost_models.layout import Layout, Layouts
from cost_models.prediction import predict
from planner.bounds import parse_bounds
from planner.question import Question, ask, default_global_batch


def refused(code: str, **options: object) -> TitanPlanError:
    with pytest.raises(TitanPlanError) as error:
        ask(**{"model": "tiny", "npus": 8, **options})  # type: ignore[arg-type]
    assert error.value.code == code
    assert error.value.hint
    return error.value


def test_a_model_and_devices_are_enough() -> None:
    asked = ask(model="70B", npus=64)
    assert asked.setting.model.name == "llama2-70b"
    assert asked.setting.cluster.name == "atlas-800t-a2"
    assert asked.setting.workload.seq_len == 4096
    assert asked.setting.workload.global_batch == 256
    assert asked.setting.workload.precision == "bf16"
    assert asked.setting.n_devices == 64
    assert asked.tokens == 0
    assert asked.top == 5
    assert asked.margin_bytes == round(0.05 * asked.setting.cluster.device.usable_memory_bytes)


def test_names_stay_as_the_user_gave_them() -> None:
    asked = ask(model="70b", npus=8, cluster="910B")
    assert (asked.model_name, asked.cluster_name) == ("70b", "910B")
    assert asked.setting.cluster.name == "atlas-800t-a2"


def test_a_device_without_bf16_trains_in_fp16() -> None:
    assert ask(model="tiny", npus=8, cluster="atlas-800-910a").setting.workload.precision == "fp16"


def test_every_answer_of_a_user_goes_before_its_default() -> None:
    asked = ask(
        model="tiny", npus=8, seq_len=64, global_batch=24, precision="fp32", optimizer="sgd", tokens="2B", top=3,
        hbm_margin="2GiB", bounds=parse_bounds(("tp=2",), ()),
    )  # fmt: skip
    workload = asked.setting.workload
    assert (workload.seq_len, workload.global_batch, workload.precision, workload.optimizer) == (64, 24, "fp32", "sgd")
    assert (asked.tokens, asked.top, asked.margin_bytes) == (2e9, 3, 2 * 2**30)
    assert asked.bounds.value_of("tp") == 2


@pytest.mark.parametrize(
    ("npus", "batch"), [(1, 256), (8, 256), (64, 256), (2048, 256), (4096, 512), (16384, 2048), (24, 384), (48, 384)]
)
def test_the_default_batch_grows_with_the_devices_and_every_power_of_two_share_divides_it(
    npus: int, batch: int
) -> None:
    assert default_global_batch(npus) == batch


@pytest.mark.parametrize("npus", [1, 3, 8, 24, 56, 384, 1000, 12288])
def test_the_default_batch_is_a_multiple_of_the_odd_part_of_the_devices(npus: int) -> None:
    odd = npus // (npus & -npus)
    batch = default_global_batch(npus)
    assert batch % odd == 0
    assert (batch // odd).bit_count() == 1
    assert max(256, npus / 8) <= batch < 2 * max(256, npus / 8, odd)


@pytest.mark.parametrize(("npus", "code"), [(0, "T301"), (-8, "T301"), (63, "T303"), (7, "T304"), (10**7, "C610")])
def test_devices_that_no_job_has_are_refused(npus: int, code: str) -> None:
    assert str(npus) in refused(code, npus=npus).message


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"model": "no-such"}, "C601"),
        ({"cluster": "no-such"}, "C602"),
        ({"seq_len": 0}, "C610"),
        ({"seq_len": -1}, "C610"),
        ({"seq_len": 10**27}, "C610"),
        ({"global_batch": 0}, "C610"),
        ({"global_batch": 10**27}, "C610"),
        ({"precision": "int8"}, "C611"),
        ({"precision": "bf16", "cluster": "atlas-800-910a"}, "T305"),
        ({"optimizer": "lion"}, "C611"),
        ({"tokens": "many"}, "C610"),
        ({"hbm_margin": "2GB"}, "C609"),
        ({"hbm_margin": "100%"}, "C610"),
        ({"bounds": parse_bounds(("tp=3",), ())}, "C650"),
        ({"model": "gpt2-1.5b", "seq_len": 4096}, "C610"),
        ({"calibration": "no-such.yaml"}, "C603"),
    ],
)
def test_what_cannot_be_searched_is_refused(options: dict[str, object], code: str) -> None:
    refused(code, **options)


def test_a_calibration_file_goes_before_the_shipped_one() -> None:
    shipped = Path(__file__).parents[2] / "configs" / "calibrations" / "h100.yaml"
    asked: Question = ask(model="tiny", npus=8, calibration=str(shipped))
    assert asked.setting.calibration != ask(model="tiny", npus=8).setting.calibration
    assert asked.setting.calibration.name in shipped.read_text(encoding="utf-8")


def test_a_forced_algorithm_is_spelled_as_its_library_does_and_an_unknown_one_is_refused() -> None:
    assert ask(model="tiny", npus=16, comm_algorithm="nhr").setting.algorithm == "NHR"
    assert ask(model="tiny", npus=16).setting.algorithm == "auto"
    with pytest.raises(TitanPlanError) as error:
        ask(model="tiny", npus=8, comm_algorithm="tree")
    assert error.value.code == "T309"
    assert "NHR" in error.value.hint


def test_forcing_an_algorithm_is_never_faster_than_the_library_s_choice() -> None:
    layouts = Layouts.of([Layout(tp=8, sp=True, dp=8, dp_shard=8, zero=zero, accumulation=4) for zero in (1, 2, 3)])
    steps = {
        name: predict(ask(model="llama2-7b", npus=64, comm_algorithm=name).setting, layouts).step_time_s
        for name in ("auto", "ring", "NHR", "NB")
    }
    assert all((steps["auto"] <= steps[name] * (1 + 1e-9)).all() for name in steps)
    assert (steps["ring"] != steps["auto"]).any()
