"""First values of parameters: from the seed and the parameter's name alone, so that every layout starts alike."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from cost_models.model import ModelSpec

STANDARD_DEVIATION = 0.02


def first_values(
    name: str,
    shape: tuple[int, ...],
    model: ModelSpec,
    seed: int,
    device: torch.device,
    take: Callable[[Tensor], Tensor],
) -> Tensor:
    """This rank's part of a parameter.

    Args:
        shape: of the whole parameter.
        take: cuts this rank's part out of the whole.

    Returns:
        Normal values of deviation 0.02 for matrices, divided by sqrt(2 layers) where they write to the residual stream
        (GPT-2, section 2.3); ones for norms, zeros for biases.
    """
    if name.endswith("bias"):
        return take(torch.zeros(shape, device=device))
    if "norm" in name:
        return take(torch.ones(shape, device=device))
    writes = name.endswith(("out.weight", "down.weight", "experts.down"))
    deviation = STANDARD_DEVIATION / math.sqrt(2 * model.n_layers) if writes else STANDARD_DEVIATION
    generator = torch.Generator(device=device).manual_seed(_seed_of(name, seed))
    whole = torch.empty(shape, device=device).normal_(0.0, deviation, generator=generator)
    return take(whole)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
