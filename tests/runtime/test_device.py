"""Looking for devices: a broken, hanging or absent driver is told in a note and never harms the caller."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cost_models.errors import TitanPlanError
from runtime.device import BACKENDS, find_devices, open_device, usable_cores

AUTOLOADED = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TITAN_PLAN_DEVICE", raising=False)


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that `probe="a_probe"` runs."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "a_probe.py"


def install_torch_npu(folder: Path, code: str) -> None:
    """A torch_npu that torch would load by itself, as the real one says."""
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(code, encoding="utf-8")
    info = folder / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(AUTOLOADED, encoding="utf-8")


def test_the_caller_does_not_import_torch() -> None:
    program = "import sys, runtime.device, runtime.launch, runtime.launch_local; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_a_cpu_is_always_there_and_counts_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_PLAN_DEVICE", "cpu")
    found = find_devices(probe="no.such.module")
    assert (found.kind, found.backend) == ("cpu", "gloo")
    assert found.count == usable_cores() == len(os.sched_getaffinity(0))
    assert 0 < found.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_PLAN_DEVICE", "gpu")
    with pytest.raises(TitanPlanError) as caught:
        find_devices()
    assert (caught.value.code, caught.value.hint) == ("C611", "one of npu, cuda, cpu is needed")


@pytest.mark.parametrize(("kind", "backend"), [("npu", "hccl"), ("cuda", "nccl")])
def test_an_accelerator_that_the_probe_names_is_used(probe: Path, kind: str, backend: str) -> None:
    said = f'{{"kind": "{kind}", "count": 2, "names": ["a", "b"], "memory_bytes": 7}}'
    probe.write_text(f"print('a driver says hello'); print('[1]'); print('{said}')", encoding="utf-8")
    found = find_devices(probe="a_probe")
    assert (found.kind, found.backend, found.count) == (kind, backend, 2)
    assert (found.names, found.memory_bytes, found.notes) == (("a", "b"), 7, ())


def test_an_npu_goes_before_a_gpu_and_a_choice_before_both(probe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f'print(\'{{"kind": "{kind}", "count": 1}}\');' for kind in ("cuda", "npu"))
    probe.write_text(lines, encoding="utf-8")
    assert find_devices(probe="a_probe").kind == "npu"
    monkeypatch.setenv("TITAN_PLAN_DEVICE", "CUDA")
    assert find_devices(probe="a_probe").kind == "cuda"


def test_a_kind_that_is_asked_for_and_absent_has_no_devices(probe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe.write_text('print(\'{"note": "no CANN"}\')', encoding="utf-8")
    monkeypatch.setenv("TITAN_PLAN_DEVICE", "npu")
    found = find_devices(probe="a_probe")
    assert (found.kind, found.count, found.notes) == ("npu", 0, ("TITAN_PLAN_DEVICE=npu", "no CANN"))


def test_a_probe_that_hangs_with_a_child_is_stopped_and_what_it_said_counts(probe: Path) -> None:
    probe.write_text(
        "import subprocess, sys, time\n"
        'print(\'{"step": "import torch_npu"}\', flush=True)\n'
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "time.sleep(60)\n",
        encoding="utf-8",
    )
    started = time.monotonic()
    found = find_devices(0.5, probe="a_probe")
    assert time.monotonic() - started < 5
    assert found.kind == "cpu"
    assert found.notes == ("the device probe hung in import torch_npu and was stopped after 0.5 s",)


def test_a_probe_that_dies_is_told_with_its_last_line(probe: Path) -> None:
    probe.write_text("import os; os.write(2, b'driver: no such slot\\n'); os.abort()", encoding="utf-8")
    assert find_devices(probe="a_probe").notes == ("the device probe died (-6): driver: no such slot",)


def test_a_torch_npu_without_its_libraries_is_told_and_the_cpu_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch by itself would die of it, so the stub shows that as well."""
    install_torch_npu(tmp_path, "raise OSError('libhccl.so: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = find_devices()
    assert found.kind == "cpu"
    assert found.notes == (
        "torch_npu is installed but not used: OSError: libhccl.so: cannot open shared object file; "
        "source set_env.sh of CANN first",
    )


def test_a_kind_of_device_that_nobody_knows_cannot_be_opened() -> None:
    assert set(BACKENDS) == {"npu", "cuda", "cpu"}
    with pytest.raises(TitanPlanError, match="tpu"):
        open_device("tpu", 0)
