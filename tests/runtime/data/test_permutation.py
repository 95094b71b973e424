"""The order of an epoch is a permutation, differs by seed and epoch, and favours no place."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.permutation import mix, permuted

seeds = st.integers(0, 2**63 - 1)


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 1500), seed=seeds, epoch=st.integers(0, 10**9))
def test_every_number_comes_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(index, n, seed=seed, epoch=epoch) for index in range(n)) == list(range(n))


@given(n=st.integers(1, 2**48), seed=seeds, data=st.data())
def test_two_numbers_of_a_large_set_never_meet(n: int, seed: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=8))
    images = [permuted(index, n, seed=seed, epoch=3) for index in indices]
    assert len(set(images)) == len(indices)
    assert all(0 <= image < n for image in images)


@pytest.mark.parametrize("n", [3, 8, 17, 100])
def test_each_place_is_equally_likely(n: int) -> None:
    """Chi-square over epochs: 99.9 % of uniform orders give less than the bound (normal approximation)."""
    epochs = 200 * n
    for index in (0, n - 1):
        seen = Counter(permuted(index, n, seed=7, epoch=epoch) for epoch in range(epochs))
        chi_square = sum((seen[place] - 200) ** 2 / 200 for place in range(n))
        assert chi_square < n - 1 + 4 * (2 * (n - 1)) ** 0.5 + 4


def test_neighbours_do_not_stay_neighbours() -> None:
    order = [permuted(index, 5000, seed=1, epoch=0) for index in range(5000)]
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 15  # 2 of a random order


def test_epochs_and_seeds_give_other_orders() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(permuted(index, 50, seed=seed, epoch=epoch) for index in range(50))

    assert len({order(seed, epoch) for seed in range(10) for epoch in range(10)}) == 100


def test_mix_is_splitmix64() -> None:
    """First outputs for seed 1234567, as Rosetta Code lists them."""
    golden = 0x9E3779B97F4A7C15
    assert mix(1234567) == 6457827717110365317
    assert mix(1234567 + golden) == 3203168211198807973


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=r"not in 0\.\.4"):
        permuted(index, 5, seed=0, epoch=0)
