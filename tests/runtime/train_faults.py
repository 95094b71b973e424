"""What tests break inside a trainer before it trains: one function is called, in the process of each rank."""

from __future__ import annotations

import math
import os
import resource
from typing import TYPE_CHECKING, Any

from runtime.engine import Engine
from runtime.loss_scale import LossScale
from runtime.parallel.trainable import publish

if TYPE_CHECKING:
    from collections.abc import Callable

BAD_STEP = 3
LARGE_SCALE = 2.0**40


def nan_on_rank_1() -> None:
    """From step 3 on a weight of rank 1 is no number."""
    if os.environ.get("RANK", "0") == "1":
        _before_step(BAD_STEP, _poison)


def _poison(engine: Engine) -> None:
    engine.trainables[0].weight.fill_(math.nan)
    publish(engine.trainables)


def small_files() -> None:
    """No file grows beyond a MiB: metrics and TensorBoard fit, the tensors of a checkpoint do not."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))


def large_first_scale() -> None:
    """Dynamic scaling begins so high that its first steps overflow for sure."""
    plain = LossScale.of

    def of(precision: str, fixed: float | None) -> LossScale:
        found = plain(precision, fixed)
        if found.dynamic:
            found.scale = LARGE_SCALE
        return found

    LossScale.of = of  # type: ignore[assignment, method-assign]


def _before_step(number: int, act: Callable[[Engine], Any]) -> None:
    plain, taken = Engine.step, [0]

    def step(self: Engine, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        taken[0] += 1
        if taken[0] == number:
            act(self)
        return plain(self, *given, **named)

    Engine.step = step  # type: ignore[method-assign]
