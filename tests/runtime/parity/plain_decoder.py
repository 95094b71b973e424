"""The decoder family once more, out of stock PyTorch operators, and how it is trained: the truth for one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cost_models.model import ModelSpec
    from tests.runtime.parity.training import Curve

BALANCE = 0.01


class PlainDecoder(nn.Module):
    """GQA or MHA, RMSNorm or LayerNorm, SwiGLU or GELU, rotary or learned positions, dense or with experts.

    Args:
        weights: first values by the trainer's names.
    """

    def __init__(self, model: ModelSpec, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        self.weights = {name: nn.Parameter(value.clone()) for name, value in weights.items()}

    def losses(self, sequences: Tensor) -> tuple[Tensor, Tensor]:
        """Mean token loss, and the balance loss to be added; sequences (batch, length + 1)."""
        tokens, labels = sequences[:, :-1], sequences[:, 1:]
        x = F.embedding(tokens, self.weights["embedding.weight"])
        if self.model.position == "learned":
            x = x + self.weights["embedding.positions"][: tokens.shape[1]]
        balance = torch.zeros(())
        for index in range(self.model.n_layers):
            at = f"layers.{index}"
            x = x + self._attention(self._norm(x, f"{at}.attention_norm"), f"{at}.attention")
            normed = self._norm(x, f"{at}.mlp_norm")
            if self.model.moe is None:
                x = x + self._mlp(normed, f"{at}.mlp")
            else:
                out, lost = self._experts(normed, f"{at}.mlp")
                x, balance = x + out, balance + lost
        head = "embedding.weight" if self.model.tied_embeddings else "head.weight"
        logits = F.linear(self._norm(x, "head.norm"), self.weights[head])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), balance

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        if self.model.norm == "layernorm":
            return F.layer_norm(x, weight.shape, weight, self.weights[f"{name}.bias"], self.model.norm_epsilon)
        return F.rms_norm(x, weight.shape, weight, self.model.norm_epsilon)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _attention(self, x: Tensor, name: str) -> Tensor:
        model, (batch, length, _) = self.model, x.shape
        q, k, v = (
            self._linear(x, f"{name}.{part}").view(batch, length, -1, model.head_dim).transpose(1, 2)
            for part in ("q", "k", "v")
        )
        if model.position == "rope":
            q, k = turned(q, model.rope_theta), turned(k, model.rope_theta)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._linear(out.transpose(1, 2).flatten(2), f"{name}.out")

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        up = self._linear(x, f"{name}.up")
        if not self.model.gated_mlp:
            return self._linear(F.gelu(up, approximate="tanh"), f"{name}.down")
        return self._linear(F.silu(self._linear(x, f"{name}.gate")) * up, f"{name}.down")

    def _experts(self, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Every expert on every token, weighted by 0 where it was not chosen; balance loss of arXiv:2412.19437 (17)."""
        moe = self.model.moe
        assert moe is not None
        shares = F.linear(x, self.weights[f"{name}.router.weight"]).softmax(-1)
        chosen = torch.zeros_like(shares).scatter(-1, shares.topk(moe.top_k, -1).indices, 1.0)
        weights = shares * chosen / (shares * chosen).sum(-1, keepdim=True)
        gate, up, down = (self.weights[f"{name}.experts.{part}"] for part in ("gate", "up", "down"))
        hidden = F.silu(torch.einsum("bth,efh->btef", x, gate)) * torch.einsum("bth,efh->btef", x, up)
        out = torch.einsum("btef,ehf,bte->bth", hidden, down, weights)
        fraction = chosen.mean(1) * moe.experts / moe.top_k
        return out, BALANCE * (fraction * shares.mean(1)).sum(-1).mean()


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding by complex numbers; halves of a head are real and imaginary part."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), frequencies)
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), -1).to(x.dtype)


def train_plainly(model: ModelSpec, weights: Mapping[str, Tensor], steps: list[Tensor], lr: float) -> Curve:
    """AdamW on whole batches, matrices decayed, gradients clipped to a norm of 1."""
    decoder = PlainDecoder(model, weights)
    parameters = list(decoder.weights.values())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    curve = []
    for sequences in steps:
        loss, balance = decoder.losses(sequences)
        optimizer.zero_grad()
        (loss + balance).backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve
