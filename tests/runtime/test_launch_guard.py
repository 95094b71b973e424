"""Whether a machine carries a run: what is refused, and what is said would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.errors import TitanPlanError
from runtime.config import TrainConfig, parse_config
from runtime.device import Devices
from runtime.launch_guard import check_devices, most_ranks

GIB = 2**30
CPU = Devices(kind="cpu", backend="gloo", count=2, memory_bytes=8 * GIB)
NPUS = Devices(kind="npu", backend="hccl", count=8, names=("Ascend910B2",) * 8, memory_bytes=60 * GIB)


def config(ranks: int, model: str = "tiny", cluster: str = "atlas-800t-a2") -> TrainConfig:
    values = {"model": {"name": model}, "distributed": {"dp_size": ranks}, "cluster": cluster or None}
    return parse_config(values, "plan/config.yaml")


def refusal(given: TrainConfig, devices: Devices) -> TitanPlanError:
    with pytest.raises(TitanPlanError) as caught:
        check_devices(given, devices)
    assert (caught.value.code, caught.value.exit_code) == ("R720", 2)
    return caught.value


def test_ranks_on_a_cpu_share_cores_up_to_four_a_core() -> None:
    assert most_ranks(CPU) == 8
    check_devices(config(8), CPU)
    assert "2 CPU cores, for at most 8 ranks" in refusal(config(9), CPU).message


def test_an_npu_holds_one_rank() -> None:
    check_devices(config(8), NPUS)
    told = refusal(config(64), NPUS)
    assert (
        told.message
        == "plan/config.yaml is for 64 devices (atlas-800t-a2), this machine has 8 npu devices (Ascend910B2)"
    )
    for way in ("--local", "titan-plan --model tiny --npus 8", "--nodes HOST1,HOST2,...,HOST8 shows what each of 8"):
        assert way in told.hint


@pytest.mark.parametrize(("ranks", "hosts"), [(16, "HOST1,HOST2 "), (24, "HOST1,HOST2,HOST3 ")])
def test_a_few_nodes_are_spelled_out(ranks: int, hosts: str) -> None:
    assert f"--nodes {hosts}" in refusal(config(ranks), NPUS).hint


def test_without_a_cluster_the_nodes_are_like_this_machine() -> None:
    told = refusal(config(32, cluster=""), NPUS)
    assert "each of 4 nodes" in told.hint
    assert "each of 4 nodes" in refusal(config(32, cluster="a-file-elsewhere.yaml"), NPUS).hint


def test_a_machine_without_devices_says_why() -> None:
    none = Devices(kind="npu", backend="hccl", count=0, notes=("no CANN",))
    told = refusal(config(1, cluster=""), none)
    assert told.message == "plan/config.yaml is for 1 device, this machine has 0 npu devices [no CANN]"
    assert "--local" not in told.hint


def test_a_model_that_the_memory_of_a_cpu_cannot_hold_is_refused() -> None:
    """7B parameters x 16 bytes = 100 GiB, whatever the layout is."""
    told = refusal(config(8, model="llama2-7b"), CPU)
    assert "at least 100.4 GiB" in told.message
    assert "8.0 GiB free" in told.message
    check_devices(config(8, model="llama2-7b"), replace(CPU, memory_bytes=120 * GIB))
