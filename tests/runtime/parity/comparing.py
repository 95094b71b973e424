"""How far the curves of a layout may be from those of one process, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.runtime.parity.cases import Case
from tests.runtime.parity.models import MODELS
from tests.runtime.parity.training import Curve, train

if TYPE_CHECKING:
    from tests.ranks import RankPool

Reference = Callable[[Case], Curve]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Largest relative deviation of a step's loss and gradient norm."""

    loss: float
    norm: float


FULL = Bound(loss=1e-5, norm=1e-4)


def run(ranks: RankPool, given: Case, steps: int) -> Curve:
    """The curve of a case; all ranks must have been told the same."""
    curves = ranks.run(given.world, train, MODELS[given.model], given.sections, steps, given.move_all)
    assert all(curve == curves[0] for curve in curves), "ranks disagree"
    return curves[0]


def deviation(found: Curve, wanted: Curve) -> Bound:
    """The largest relative deviations over all steps."""
    assert len(found) == len(wanted)
    loss, norm = (max(abs(a[i] / b[i] - 1) for a, b in zip(found, wanted, strict=True)) for i in range(2))
    return Bound(loss=loss, norm=norm)


def assert_same_curve(found: Curve, wanted: Curve, bound: Bound) -> None:
    """Fail with both curves."""
    got = deviation(found, wanted)
    if not (got.loss <= bound.loss and got.norm <= bound.norm):  # a NaN fails
        pytest.fail(f"{got} beyond {bound}\nfound:  {found}\nwanted: {wanted}")
