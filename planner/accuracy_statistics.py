"""Statistics of predicted against measured: errors, Kendall's tau-b, and the regret of picking the predicted best."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors, predicted / measured - 1, of `rows` rows; None where there are none.

    Attributes:
        median, p90: of the absolute errors.
        bias: median of the signed errors; negative where predictions are too low.
    """

    rows: int
    median: float | None
    p90: float | None
    bias: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How well predictions order the layouts of one sweep.

    Attributes:
        tau: Kendall's tau-b; None where all predictions or all measurements are equal.
        agreeing, pairs: pairs of layouts that measurement tells apart, and those that the prediction orders alike.
        regret: how much slower the layout with the best prediction was measured than the best measured one.
    """

    rows: int
    tau: float | None
    agreeing: int
    pairs: int
    regret: float


def errors_of(pairs: Sequence[tuple[float, float]]) -> Errors:
    """Errors of (predicted, measured) pairs."""
    signed = [predicted / measured - 1 for predicted, measured in pairs]
    if not signed:
        return Errors(rows=0, median=None, p90=None, bias=None)
    absolute = sorted(map(abs, signed))
    return Errors(
        rows=len(signed),
        median=statistics.median(absolute),
        p90=quantile(absolute, 0.9),
        bias=statistics.median(signed),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours, as NumPy's default."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def kendall_tau_b(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b: (agreeing - opposing pairs) over the geometric mean of the pairs that each side tells apart."""
    signs = [_signs(a, b) for a, b in itertools.combinations(zip(first, second, strict=True), 2)]
    balance = sum(x * y for x, y in signs)
    told_apart = sum(x != 0 for x, _ in signs) * sum(y != 0 for _, y in signs)
    return balance / math.sqrt(told_apart) if told_apart else None


def order_of(pairs: Sequence[tuple[float, float]], fits: Sequence[bool] | None = None) -> Order:
    """Order of a sweep of (predicted, measured) step times.

    Args:
        fits: layouts that may be picked; all where none is given or none fits.
    """
    signs = [_signs(a, b) for a, b in itertools.combinations(pairs, 2)]
    allowed = [pair for pair, may in zip(pairs, fits, strict=True) if may] if fits else []
    picked = min(allowed or pairs)[1]
    return Order(
        rows=len(pairs),
        tau=kendall_tau_b([p for p, _ in pairs], [m for _, m in pairs]),
        agreeing=sum(x * y > 0 for x, y in signs),
        pairs=sum(y != 0 for _, y in signs),
        regret=picked / min(measured for _, measured in pairs) - 1,
    )


def _signs(a: tuple[float, float], b: tuple[float, float]) -> tuple[int, int]:
    return (a[0] > b[0]) - (a[0] < b[0]), (a[1] > b[1]) - (a[1] < b[1])
