"""torch.compile of each layer; what surrounds a layer (gathering, recomputation, offloading) stays as it is.

Under pipeline, recomputation and FSDP the same compiled function serves every micro batch. Selective recomputation is
left to the compiler: its partitioner makes outputs of norms and activations again where that is cheaper than keeping
them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
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
        found.run = torch.compile(found.run, backend=BACKEND)
        found.selective = False
