"""Looks for NPUs and GPUs in a process of its own and says what it finds: `python -m runtime.device_probe`.

Each line of its output is an object: {"step": what comes next}, so that a hang has a place, {"kind", "count", "names",
"memory_bytes"} for devices found, {"note"} for why something is not used.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def main() -> int:
    """Say what there is; nothing that a driver does ends in a traceback."""
    # Not when torch is asked to load it by itself: `import torch` would then fail with it (see device.py).
    _say(step="import torch")
    try:
        torch = import_module("torch")
    except Exception as error:  # noqa: BLE001 - a broken torch is a finding
        _say(note=f"torch cannot be imported: {_reason(error)}")
        return 0
    cuda = _try("torch.cuda", lambda: _devices(torch.cuda))
    if cuda:
        _say(kind="cuda", **cuda)
    if find_spec("torch_npu") is None:
        return 0
    if cuda:
        # torch_npu refuses a process with another accelerator, "Two accelerators cannot be used at the same time".
        _say(note="torch_npu is installed but not used: it refuses a torch that sees GPUs")
        return 0
    _look_for_npus(torch)
    return 0


def _look_for_npus(torch: Any) -> None:  # noqa: ANN401 - the module
    _say(step="import torch_npu")
    try:
        import_module("torch_npu")
    except BaseException as error:  # noqa: BLE001 - ImportError, OSError for libhccl or libascendcl, even SystemExit
        hint = "; source set_env.sh of CANN first" if "lib" in str(error) else ""
        _say(note=f"torch_npu is installed but not used: {_reason(error)}{hint}")
        return
    npu = _try("torch.npu", lambda: _devices(torch.npu))
    if npu:
        _say(kind="npu", **npu)
    else:
        _say(note="torch_npu is installed and works, but sees no NPU")


def _try(step: str, look: Any) -> dict[str, Any] | None:  # noqa: ANN401 - a function without arguments
    _say(step=step)
    try:
        found: dict[str, Any] | None = look()
    except Exception as error:  # noqa: BLE001 - whatever a driver raises is a finding
        _say(note=f"{step} failed: {_reason(error)}")
        return None
    return found


def _devices(namespace: Any) -> dict[str, Any] | None:  # noqa: ANN401 - torch.cuda or torch.npu
    if not namespace.is_available() or not namespace.device_count():
        return None
    count = namespace.device_count()
    return {
        "count": count,
        "names": [namespace.get_device_name(index) for index in range(count)],
        # What is free now, not what the data sheet says: driver, context and other jobs have taken their part.
        "memory_bytes": min(namespace.mem_get_info(index)[0] for index in range(count)),
    }


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def _say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
