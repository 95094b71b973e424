"""The scale of fp16's loss: fixed, or doubled after a time without overflow and halved at each one.

Micikevicius et al. 2018 (arXiv:1710.03740, section 3.2); the numbers are torch.amp.GradScaler's.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST = 2.0**16
_GROWTH_STEPS = 2000
_SMALLEST = 1.0


@dataclass(slots=True)
class LossScale:
    """The scale in force.

    Attributes:
        scale: factor of the loss.
        dynamic: whether overflows move it.
        clean_steps: steps since it last moved.
    """

    scale: float = 1.0
    dynamic: bool = False
    clean_steps: int = 0

    @classmethod
    def of(cls, precision: str, fixed: float | None) -> LossScale:
        """As the config asks: only fp16 needs one."""
        if precision != "fp16":
            return cls()
        return cls(scale=_FIRST, dynamic=True) if fixed is None else cls(scale=fixed)

    def update(self, *, overflow: bool) -> None:
        """After a step."""
        if not self.dynamic:
            return
        if overflow:
            self.scale, self.clean_steps = max(self.scale / 2, _SMALLEST), 0
            return
        self.clean_steps += 1
        if self.clean_steps >= _GROWTH_STEPS:
            self.scale, self.clean_steps = self.scale * 2, 0

    @property
    def exhausted(self) -> bool:
        """Overflow at the smallest scale, or at a fixed one, is not the scale's fault."""
        return not self.dynamic or self.scale <= _SMALLEST
