"""One decoder layer: attention and MLP, each behind a norm and added to the residual stream."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch import nn
from torch.utils.checkpoint import checkpoint

from runtime.memory.saving import Saving

from . import norms
from .mlp import Mlp
from .moe import SparseMlp
from .norms import Norm
from .self_attention import attention_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from cost_models.model import ModelSpec

    from .building import Build


class Layer(nn.Module):
    """A layer of the decoder.

    Attributes:
        run: forward without recomputation; torch.compile may stand in for it.
        selective: outputs of norms and activations are made again in backward.

    Args:
        index: of the layer in the whole model.
        first: of its chunk.
        recompute: only the layer's input is kept, and its forward runs again in backward.
    """

    def __init__(
        self, model: ModelSpec, index: int, build: Build, *, first: bool = True, recompute: bool = False
    ) -> None:
        super().__init__()
        self.attention_norm = Norm(model.hidden_dim, model.norm_epsilon, model.norm)
        self.attention = attention_for(model, build)
        self.mlp_norm = Norm(model.hidden_dim, model.norm_epsilon, model.norm)
        dense = index < model.dense_layers or model.moe is None
        self.mlp = Mlp(model, model.ffn_dim, build) if dense else SparseMlp(model, build)
        self.first, self.recompute = first, recompute
        self.run: Callable[[Tensor, Saving], Tensor] = self._run
        self.selective = build.selective
        self._build = build

    def forward(self, x: Tensor) -> Tensor:
        """Own tokens to own tokens, (tokens, hidden)."""
        build = self._build
        if build.host is not None:
            build.host.begin_layer(first=self.first)
        saving = Saving(selective=self.selective, host=build.host)
        with saving.around():
            out = self._recomputed(x, saving) if self.recompute else self.run(x, saving)
        saving.close()
        return out

    def _recomputed(self, x: Tensor, saving: Saving) -> Tensor:
        """No random numbers are drawn in a layer, so their state need not be kept."""
        out: Tensor = checkpoint(
            self.run,
            x,
            saving,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), self._build.recomputing()),
        )
        return out

    def _run(self, x: Tensor, saving: Saving) -> Tensor:
        normed = saving.remake(self.attention_norm(x), norms.again)
        x = x + self.attention(normed, saving)
        normed = saving.remake(self.mlp_norm(x), norms.again)
        return x + self.mlp(normed, saving)
