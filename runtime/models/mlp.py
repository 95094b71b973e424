"""The dense MLP, gated or plain, cut over tp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from runtime.parallel.tensor import column_linear, row_linear

from . import activations

if TYPE_CHECKING:
    from torch import Tensor

    from cost_models.model import ModelSpec
    from runtime.memory.saving import Saving

    from .building import Build


class Linear(nn.Module):
    """Weight and bias of one linear layer; who applies it knows how it is cut."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None


class Mlp(nn.Module):
    """Gate and up projections (or up alone), activation, down projection."""

    def __init__(self, model: ModelSpec, width: int, build: Build) -> None:
        super().__init__()
        local, hidden, bias = width // build.tp.size, model.hidden_dim, model.mlp_bias
        self.gate = Linear(hidden, local, bias=bias) if model.gated_mlp else None
        self.up = Linear(hidden, local, bias=bias)
        self.down = Linear(local, hidden, bias=bias)
        self._tp = build.tp

    def forward(self, x: Tensor, saving: Saving) -> Tensor:
        """Normed own tokens to own tokens, (tokens, hidden)."""
        if self.gate is None:
            (up,) = column_linear(x, (self.up.weight,), (self.up.bias,), self._tp)
            activated = activations.plain(up)
        else:
            both = (self.gate.weight, self.up.weight), (self.gate.bias, self.up.bias)
            gate, up = column_linear(x, *both, self._tp)
            activated = activations.gated(gate, up)
        saving.remake(activated, activations.again)
        return row_linear(activated, self.down.weight, self.down.bias, self._tp)
