"""What a user is told when numbers overflow, memory runs out, or the disk is full."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cost_models.catalog import find_model
from cost_models.errors import TitanPlanError
from cost_models.layout import Layout
from cost_models.workload import Workload
from runtime.config_values import TrainConfig
from runtime.faults import disk_full, non_finite_loss, out_of_memory

CONFIG = TrainConfig(
    model=find_model("tiny"),
    workload=Workload(seq_len=128, global_batch=64),
    layout=Layout(dp=4, micro_batch=4, accumulation=4),
)
# As torch_npu prints it (vllm-omni issue 1199), torch for CUDA, CANN, HCCL, and torch's allocator of host memory.
NO_MEMORY = [
    "NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity; 59.36 GiB already allocated; "
    "19.52 MiB free; 59.65 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
    "max_split_size_mb to avoid fragmentation.",
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB with 1.00 GiB free.",
    "[PID: 1604822] 2026-03-24-12:13:53.809.770 Memory_Allocation_Failure(EL0004): Failed to allocate memory.",
    "EI0011: Failed to allocate 209715200 bytes of NPU memory.",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4611686018427387904 bytes. Error code 12 (Cannot allocate memory)",
]


def oom(config: TrainConfig, error: BaseException | None = None) -> TitanPlanError:
    told = out_of_memory(error or torch.OutOfMemoryError("NPU out of memory."), config)
    assert told is not None
    assert (told.code, told.exit_code) == ("R751", 1)
    return told


@pytest.mark.parametrize("text", NO_MEMORY)
def test_memory_errors_of_every_library_are_known(text: str) -> None:
    told = oom(CONFIG, RuntimeError(text))
    assert CONFIG.layout.name in told.message
    assert "allocate" in told.message
    assert len(told.message) < 300


def test_torchs_own_refusal_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert "4611686018427387904 bytes" in oom(CONFIG, caught.value).message


def test_a_memory_error_below_another_error_is_known() -> None:
    error = RuntimeError("backward failed")
    error.__cause__ = torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2.00 GiB")
    assert "Tried to allocate 2.00 GiB" in oom(CONFIG, error).message
    assert oom(CONFIG, MemoryError()).message.endswith("no reason given")


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(errno.ENOSPC, "No space left on device")])
def test_other_errors_are_not_taken_for_memory(error: Exception) -> None:
    assert out_of_memory(error, CONFIG) is None


def tries(error: TitanPlanError) -> list[str]:
    return re.findall(r"\d\. (?:training|optimization)\.(\w+)", error.hint)


def test_what_saves_memory_comes_in_the_order_of_the_guide() -> None:
    told = oom(CONFIG)
    assert tries(told) == [
        "gradient_checkpointing",
        "zero_stage",
        "micro_batch_size",
        "activation_cpu_offload",
        "swap_optimizer",
    ]
    assert "micro_batch_size: 1 with gradient_accumulation_steps: 16 (now 4)" in told.hint


def test_what_is_on_already_is_left_out() -> None:
    on = {"recompute": "full", "zero": 3, "micro_batch": 1, "activation_offload": True, "swap_optimizer": True}
    names = ["gradient_checkpointing", "zero_stage", "micro_batch_size", "activation_cpu_offload", "swap_optimizer"]
    for left_out, (key, value) in zip(names, on.items(), strict=True):
        layout = replace(CONFIG.layout, **{key: value})
        assert tries(oom(replace(CONFIG, layout=layout))) == [name for name in names if name != left_out]
    told = oom(replace(CONFIG, layout=replace(CONFIG.layout, **on)))
    assert tries(told) == []
    assert "more devices" in told.hint


def test_recompute_of_some_layers_can_become_that_of_all() -> None:
    layout = replace(CONFIG.layout, recompute="full", recompute_layers=2)
    assert "gradient_checkpointing: true (now layers=2)" in oom(replace(CONFIG, layout=layout)).hint


def test_one_data_parallel_rank_has_nobody_to_share_with() -> None:
    alone = Layout(tp=4, micro_batch=4, accumulation=16)
    assert "zero_stage" not in oom(replace(CONFIG, layout=alone)).hint


def test_a_loss_that_is_not_finite_names_step_and_rank_and_what_to_try() -> None:
    told = non_finite_loss(1234, 7, "fp16", 65536.0)
    assert (told.code, told.exit_code) == ("R750", 1)
    assert "step 1234" in told.message
    assert "rank 7" in told.message
    assert "loss scale 65536" in told.message
    order = ["skip the batch", "loss_scale: 128", "precision: bf16", "training.lr", "gradient_clip"]
    assert [told.hint.index(word) for word in order] == sorted(told.hint.index(word) for word in order)


@pytest.mark.parametrize(("scale", "lower"), [(None, "128,"), (128.0, "64,"), (256.0, "128,"), (1.0, "0.5,")])
def test_the_loss_scale_to_try_is_lower(scale: float | None, lower: str) -> None:
    assert f"loss_scale: {lower}" in non_finite_loss(1, 0, "fp16", scale).hint


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_loss_scale_is_not_a_way_out_where_there_is_none(precision: str) -> None:
    told = non_finite_loss(1, 0, precision, None)
    assert "loss scale" not in told.message + told.hint
    assert "bf16" not in told.hint


def test_a_full_disk_names_the_path_and_the_free_bytes(tmp_path: Path) -> None:
    path = tmp_path / "step-000010" / "__0_0.distcp"
    told = disk_full(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)))
    assert told is not None
    assert (told.code, told.exit_code) == ("R752", 1)
    assert str(path) in told.message
    assert re.search(r"the disk is full, \d+ bytes \(\d+\.\d\d GiB\) are free", told.message)


def test_a_used_up_quota_is_not_a_full_disk(tmp_path: Path) -> None:
    told = disk_full(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), tmp_path)
    assert told is not None
    assert f"{tmp_path} cannot be written: the quota" in told.message


def test_a_checkpoint_that_did_not_fit_is_known_although_torch_loses_the_errno(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("the system has no /dev/full")
    with pytest.raises(RuntimeError) as caught:
        torch.save({"weight": torch.ones(1_000_000)}, full)
    assert disk_full(caught.value, tmp_path) is not None


def test_an_error_that_a_checkpoint_wraps_is_found() -> None:
    from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

    wrapped = _wrap_exception(OSError(errno.ENOSPC, "No space left on device", "shard"))
    told = disk_full(CheckpointException("write", {0: wrapped}))
    assert told is not None
    assert told.message.startswith("shard cannot be written")


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), RuntimeError("shape mismatch")])
def test_other_errors_are_not_taken_for_a_full_disk(error: Exception) -> None:
    assert disk_full(error) is None
