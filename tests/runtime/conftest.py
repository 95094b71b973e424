"""The trainers of a session, which share what importing torch costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.runtime.train_processes import Trainers

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    """`trainers.run(arguments, world=2)` runs the trainer's ranks to their end."""
    found = Trainers(tmp_path_factory.mktemp("trainers"))
    yield found
    found.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `pytest -n` one worker runs them all: there is one template, and two runs at once would only be slower."""
    for item in items:
        if "trainers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("trainers"))
