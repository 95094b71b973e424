"""torch.compile of each layer; what surrounds a layer (gathering, recomputation, offloading) stays as it is.

Under pipeline, recomputation and FSDP the same compiled function serves every micro batch. Selective recomputation is
left to the compiler: its partitioner makes outputs of norms and activations again where that is cheaper than keeping
them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

import torch

from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    from runtime.config_values import TrainConfig
    from runtime.models.decoder import Decoder
    from runtime.models.layer import Layer

BACKEND = "inductor"


def compile_layers(module: Decoder, kind: str) -> None:
    """Compile the layers of a chunk when they first run.

    Args:
        kind: npu, cuda or cpu. On NPUs importing inductor_npu_ext puts AutoFuse behind inductor.
    """
    if kind == "npu":
        import_module("inductor_npu_ext")
    for layer in module.layers.values():
        found = cast("Layer", layer)
        # Every micro batch has the same shapes; symbolic ones would only be compiled, and miscompiled, for others.
        found.run = torch.compile(found.run, backend=BACKEND, dynamic=False)
        found.selective = False


def not_compiled(error: BaseException, config: TrainConfig) -> TitanPlanError | None:
    """What to do where the compiler gave up; None for any other error."""
    if not config.numerics.compile or not type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
        return None
    lines = str(error).strip().splitlines()
    message = f"torch.compile failed: {lines[0] if lines else type(error).__name__}"
    return TitanPlanError("R782", message, "run without optimization.compile", exit_code=1)
