"""Garbage during a run: old objects are left alone, new circles are collected, and afterwards all is as before."""

from __future__ import annotations

import gc
import weakref

import pytest

from runtime.garbage import settled


class Circle:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_what_lives_before_is_not_searched_and_what_comes_is_collected() -> None:
    before = gc.get_freeze_count()
    with settled():
        assert gc.get_freeze_count() > before + 1000
        seen = weakref.ref(Circle())
        gc.collect()
        assert seen() is None
    assert gc.get_freeze_count() == before


def test_a_failing_run_is_searched_again() -> None:
    with pytest.raises(ValueError, match="bad"), settled():
        raise ValueError("bad")
    assert gc.get_freeze_count() == 0
