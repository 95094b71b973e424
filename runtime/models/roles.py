"""How each parameter is cut and which ranks hold parts of its gradient, by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cost_models.layout import Layout
    from cost_models.model import ModelSpec

_FIRST_AXIS = ("q.", "k.", "v.", "q_up.", "kv_up.", "gate.", "up.")
_SECOND_AXIS = ("out.weight", "down.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One parameter.

    Attributes:
        cut: axis that is cut over tp (over ep for experts under ep > 1); None for whole.
        partial: each tp rank holds a part of the gradient; they are summed before the update.
        expert: held by the ranks of an expert group, not by all of dp x cp.
        decayed: weight decay applies (matrices; not norms, biases).
    """

    cut: int | None
    partial: bool
    expert: bool
    decayed: bool


def role_of(name: str, model: ModelSpec, layout: Layout) -> Role:
    """The role of a parameter of the whole model."""
    last = ".".join(name.split(".")[-2:])
    decayed = "norm" not in name and not name.endswith("bias")
    if ".experts." in name:
        return Role(cut=_expert_axis(name, layout), partial=False, expert=True, decayed=True)
    cut = _axis(name, last)
    whole = cut is None and layout.tp > 1
    per_head = whole and not model.mla and ("q_norm" in name or "k_norm" in name)
    return Role(
        cut=cut if layout.tp > 1 else None, partial=whole and (layout.sp or per_head), expert=False, decayed=decayed
    )


def _expert_axis(name: str, layout: Layout) -> int | None:
    if layout.ep > 1:
        return 0
    if layout.tp == 1:
        return None
    return 2 if name.endswith("down") else 1


def _axis(name: str, last: str) -> int | None:
    if name in {"embedding.weight", "head.weight"}:
        return 0
    if "norm" in last or "router" in last:
        return None
    if last.startswith(_FIRST_AXIS):
        return 0
    return 1 if last in _SECOND_AXIS else None
