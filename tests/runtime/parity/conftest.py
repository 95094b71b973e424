"""Curves of one process, each made once a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.runtime.parity.models import MODELS
from tests.runtime.parity.training import Curve, train

if TYPE_CHECKING:
    from tests.ranks import RankPool
    from tests.runtime.parity.cases import Case
    from tests.runtime.parity.comparing import Reference

STEPS = 10


@pytest.fixture(scope="session")
def reference(ranks: RankPool) -> Reference:
    """`reference(case)` is the curve that the case must follow, over 10 steps."""
    known: dict[str, Curve] = {}

    def of(given: Case) -> Curve:
        key = f"{given.model} {given.reference}"
        if key not in known:
            (known[key],) = ranks.run(1, train, MODELS[given.model], given.reference, STEPS)
        return known[key]

    return of
