"""The pool of ranks that all tests of a session share."""

from __future__ import annotations

import atexit
import signal
from typing import TYPE_CHECKING

import pytest

from tests.ranks import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure() -> None:
    """In the background or under nohup pytest ignores Ctrl-C or SIGHUP, and all that tests start inherit that."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks.run(world, function, *arguments)` gives what each rank returned."""
    pool = RankPool()
    atexit.register(pool.close)
    yield pool
    pool.close()
    atexit.unregister(pool.close)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `pytest -n` one worker runs all tests that use the pool, so that there is one pool."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
