"""A permutation of 0..n-1 by (seed, epoch) that needs no memory: a Feistel network with cycle walking."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

_ROUNDS: Final = 6
_WORD: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """64 bits to 64 well mixed bits: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + _GOLDEN) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def permuted(index: int, n: int, *, seed: int, epoch: int) -> int:
    """Where `index` of 0..n-1 goes.

    The network permutes the next power of 4 from n up; what lands above n is sent round again, which ends since the
    cycle comes back below n, after 4 rounds on average at most.

    Raises:
        ValueError: index is not in 0..n-1.
    """
    if not 0 <= index < n:
        raise ValueError(f"{index} is not in 0..{n - 1}")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, keys = (1 << half) - 1, _keys(seed, epoch)
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        index = left << half | right
        if index < n:
            return index


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    start = mix(mix(seed & _WORD) + epoch)  # not mixed apart and joined by xor: (1, 2) and (2, 1) would be one
    return tuple(mix(start + number * _GOLDEN) for number in range(_ROUNDS))
