"""The probe: what it says of torch and torch_npu in each state that they are found in."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from runtime import device_probe


def namespace(count: int, *, free: tuple[int, ...] = (5, 3)) -> SimpleNamespace:
    return SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        get_device_name=lambda index: f"device {index}",
        mem_get_info=lambda index: (free[index], 99),
    )


def fails(error: BaseException) -> Callable[[], None]:
    def loud() -> None:
        raise error

    return loud


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    """Run it with these modules; a module that is an exception cannot be imported, None is not installed."""

    def run(torch: object, torch_npu: object = None) -> list[dict[str, Any]]:
        modules = {"torch": torch, "torch_npu": torch_npu}

        def find(name: str) -> object:
            if isinstance(modules[name], BaseException):
                raise modules[name]  # type: ignore[misc]
            return modules[name]

        monkeypatch.setattr(device_probe, "import_module", find)
        monkeypatch.setattr(device_probe, "find_spec", lambda name: modules[name])
        assert device_probe.main() == 0
        said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [line for line in said if "step" not in line]

    return run


Probed = Callable[..., list[dict[str, Any]]]


def test_a_plain_torch_has_nothing_to_say(probed: Probed) -> None:
    assert probed(SimpleNamespace(cuda=namespace(0))) == []


def test_gpus_are_told_with_the_least_free_memory(probed: Probed) -> None:
    (found,) = probed(SimpleNamespace(cuda=namespace(2)))
    assert found == {"kind": "cuda", "count": 2, "names": ["device 0", "device 1"], "memory_bytes": 3}


def test_npus_are_told(probed: Probed) -> None:
    (found,) = probed(SimpleNamespace(cuda=namespace(0), npu=namespace(1)), SimpleNamespace())
    assert (found["kind"], found["count"]) == ("npu", 1)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ImportError("libhccl.so: cannot open"),
            "ImportError: libhccl.so: cannot open; source set_env.sh of CANN first",
        ),
        (OSError("libascendcl.so missing"), "OSError: libascendcl.so missing; source set_env.sh of CANN first"),
        (RuntimeError("driver version 1\nmore"), "RuntimeError: driver version 1"),
        (SystemExit(), "SystemExit"),
    ],
)
def test_a_torch_npu_that_cannot_be_imported_is_a_note(probed: Probed, error: BaseException, said: str) -> None:
    assert probed(SimpleNamespace(cuda=namespace(0)), error) == [
        {"note": f"torch_npu is installed but not used: {said}"}
    ]


def test_torch_npu_is_left_alone_beside_gpus(probed: Probed) -> None:
    """It refuses a process with two accelerators, so importing it would cost the GPUs too."""
    found = probed(SimpleNamespace(cuda=namespace(1)), AssertionError("imported"))
    assert [line.get("kind") for line in found] == ["cuda", None]
    assert "refuses" in found[1]["note"]


def test_a_driver_that_raises_is_a_note(probed: Probed) -> None:
    broken = SimpleNamespace(is_available=fails(RuntimeError("drvErr 87")))
    found = probed(SimpleNamespace(cuda=namespace(0), npu=broken), SimpleNamespace())
    assert found[0] == {"note": "torch.npu failed: RuntimeError: drvErr 87"}


def test_a_torch_that_cannot_be_imported_is_a_note(probed: Probed) -> None:
    assert probed(ImportError("no torch")) == [{"note": "torch cannot be imported: ImportError: no torch"}]
