"""Torchtitan 0.2.2's trainer on a CPU, whose steps wait for their turn: what it lacks is put in its place, no more.

It takes the device module of torch for granted to have CUDA's functions, and gloo has no premultiplied sum, which FSDP2
uses unless it is told to sum. Run by the Python that has torchtitan; arguments are torchtitan's.
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils


class CpuModule:
    """The functions that torchtitan calls of a device module."""

    def set_device(self, device: object) -> None:
        """There is one CPU."""

    def current_device(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def synchronize(self) -> None:
        """Operators of a CPU are done when they return."""

    def get_device_name(self, device: object) -> str:  # noqa: ARG002 - CUDA's signature
        return "cpu"

    def get_device_properties(self, device: object) -> SimpleNamespace:  # noqa: ARG002
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: object) -> dict[str, int]:  # noqa: ARG002
        return {}

    def reset_peak_memory_stats(self) -> None:
        """Not counted here."""

    def empty_cache(self) -> None:
        """There is none."""


def _choose_cpu() -> None:
    """`torchtitan.tools.utils` asks torch once, as it is imported; torch itself gets its own functions back."""
    names = ("_get_available_device_type", "_get_device_module")
    saved = [getattr(torch._utils, name) for name in names]
    module = CpuModule()
    for name, answer in zip(names, ("cpu", module), strict=True):
        setattr(torch._utils, name, lambda *_, answer=answer: answer)
    importlib.import_module("torchtitan.tools.utils")
    for name, function in zip(names, saved, strict=True):
        setattr(torch._utils, name, function)


def _sum_gradients() -> None:
    """FSDP2's gradients are summed by a plain sum."""
    place: Any = importlib.import_module("torchtitan.models.llama3.infra.parallelize")
    inner = place.disable_fsdp_gradient_division

    def patched(model: Any) -> None:  # noqa: ANN401 - a model whose modules FSDP2 gave methods
        inner(model)
        for part in model.modules():
            if isinstance(part, place.FSDPModule):
                part.set_force_sum_reduction_for_comms(True)

    place.disable_fsdp_gradient_division = patched


def main() -> None:
    _choose_cpu()
    _sum_gradients()
    train = importlib.import_module("torchtitan.train")
    turns = importlib.import_module("turns")  # beside this file; the rest of our project is not on the path
    train.Trainer.train_step = turns.taking_turns(train.Trainer.train_step)
    train.main(train.Trainer)


if __name__ == "__main__":
    main()
