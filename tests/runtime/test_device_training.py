"""The device of a rank: a CPU for real, NPU and GPU with namespaces that write down what is asked of them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from mmap import PAGESIZE, mmap
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cost_models.errors import TitanPlanError
from runtime import device_training
from runtime.device import open_device


class Namespace:
    """torch.cuda or torch.npu of a machine with two devices."""

    def __init__(self, kind: str, count: int = 2) -> None:
        self.kind, self.count, self.calls = kind, count, list[tuple[Any, ...]]()

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=64 + device.index)

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object, **named: object) -> int:
            self.calls.append((name, *arguments, *named.values()))
            return 7

        return call


@pytest.fixture(params=["npu", "cuda"])
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    namespace = Namespace(request.param)
    fake = SimpleNamespace(**{request.param: namespace}, device=lambda _kind, index: torch.device("cuda", index))
    monkeypatch.setattr(device_training, "torch", fake)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    return namespace


def test_an_accelerator_asks_its_namespace_about_its_own_device(accelerator: Namespace) -> None:
    device = open_device(accelerator.kind, 1)
    own = device.torch_device
    assert own.index == 1
    assert accelerator.calls == [("set_device", own)]
    assert (device.backend, device.can_pin) == ({"npu": "hccl", "cuda": "nccl"}[accelerator.kind], True)
    assert (device.memory_allocated(), device.peak_memory(), device.total_memory()) == (7, 7, 65)
    device.synchronize()
    device.reset_peak_memory()
    device.empty_cache()
    device.new_stream()
    device.current_stream()
    device.stream_context("side")
    device.rng_state()
    device.set_rng_state("state")  # type: ignore[arg-type]
    assert accelerator.calls[1:] == [
        ("memory_allocated", own), ("max_memory_allocated", own), ("synchronize", own),
        ("reset_peak_memory_stats", own), ("empty_cache",), ("Stream", own), ("current_stream", own),
        ("stream", "side"), ("get_rng_state", own), ("set_rng_state", "state", own),
    ]  # fmt: skip


def test_one_stream_waits_for_another(accelerator: Namespace) -> None:
    waited: list[object] = []
    open_device(accelerator.kind, 0).wait_stream(SimpleNamespace(wait_stream=waited.append), "copies")
    assert waited == ["copies"]


def test_a_rank_without_a_device_is_told_how_many_there_are(accelerator: Namespace) -> None:
    with pytest.raises(TitanPlanError) as caught:
        open_device(accelerator.kind, 2)
    assert (caught.value.code, caught.value.exit_code) == ("R722", 3)
    assert f"this process sees 2 {accelerator.kind} devices" in caught.value.message


def test_an_npu_without_cann_is_an_error_with_a_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_name: str) -> None:
        raise OSError("libhccl.so: cannot open shared object file\nmore")

    monkeypatch.setattr(device_training, "import_module", broken)
    with pytest.raises(TitanPlanError) as caught:
        open_device("npu", 0)
    assert caught.value.message == "torch_npu cannot be imported: libhccl.so: cannot open shared object file"
    assert "set_env.sh" in caught.value.hint


def test_a_cpu_is_the_same_for_every_rank() -> None:
    device = open_device("cpu", 5)
    assert (device.kind, device.backend, device.torch_device) == ("cpu", "gloo", torch.device("cpu"))
    assert not device.can_pin
    tensor = torch.ones(2)
    assert device.pin(tensor) is tensor
    stream = device.new_stream()
    with device.stream_context(stream):
        device.wait_stream(device.current_stream(), stream)
    device.synchronize()
    device.empty_cache()


def test_memory_of_a_cpu_is_that_of_the_process() -> None:
    device = open_device("cpu", 0)
    before = device.memory_allocated()
    held = mmap(-1, 64 * 2**20)  # a tensor may be given memory that the C library still holds
    for page in range(0, len(held), PAGESIZE):
        held[page] = 1
    assert device.memory_allocated() - before > 48 * 2**20
    assert device.memory_allocated() < device.total_memory()


def test_the_peak_of_a_cpu_starts_again_at_a_reset() -> None:
    device = open_device("cpu", 0)
    torch.ones(128 * 2**20 // 4)
    high = device.peak_memory()
    assert high >= device.memory_allocated()
    device.reset_peak_memory()
    assert device.peak_memory() < high + 2**20


_ROUNDS = """
import resource, torch
from runtime.device import open_device
open_device("cpu", 0)
for turn in range(30):
    if turn == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    several = [torch.ones(16 * 2**20 // 4) for _ in range(12)]
    del several
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="a C library without mallopt")
def test_what_a_step_frees_on_a_cpu_stays_for_the_next() -> None:
    """Left alone, the C library takes all pages from the kernel again in each of ten steps: 491,200."""
    told = subprocess.run([sys.executable, "-c", _ROUNDS], capture_output=True, check=True).stdout
    assert int(told) < 12 * 16 * 2**20 // PAGESIZE


def test_the_generator_goes_on_from_a_kept_state() -> None:
    device = open_device("cpu", 0)
    state = device.rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
