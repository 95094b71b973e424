"""Data sets of the Hub: only by the optional library, and only where the user asked for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from cost_models.errors import TitanPlanError
from runtime.data.remote import check_library, remote_texts
from runtime.data.sources import Remote

CALLS: list[tuple[object, ...]] = []


def _load(name: str, config: str | None, *, revision: str | None, split: str, streaming: bool) -> Iterator[object]:
    CALLS.append((name, config, revision, split, streaming))
    if name == "gone/away":
        raise ConnectionError("no route\nto host")
    return iter([{"text": "one"}, {"text": None}, {"text": "two"}])


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("datasets")
    module.__spec__ = ModuleSpec("datasets", None)
    module.load_dataset = _load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    CALLS.clear()


@pytest.mark.usefixtures("datasets")
def test_the_train_split_is_streamed() -> None:
    assert list(remote_texts(Remote(name="org/name", config="en", revision="v1"), "text")) == ["one", "", "two"]
    assert CALLS == [("org/name", "en", "v1", "train", True)]
    list(remote_texts(Remote(name="org/name"), "text"))
    assert CALLS[1] == ("org/name", None, None, "train", True)


@pytest.mark.usefixtures("datasets")
@pytest.mark.parametrize(("name", "key", "code"), [("gone/away", "text", "C626"), ("org/name", "body", "C622")])
def test_what_goes_wrong_is_an_error_of_ours(name: str, key: str, code: str) -> None:
    with pytest.raises(TitanPlanError) as caught:
        list(remote_texts(Remote(name=name), key))
    assert caught.value.code == code
    assert name in caught.value.message
    assert "\n" not in caught.value.message


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.data.remote.find_spec", lambda _name: None)
    with pytest.raises(TitanPlanError, match="org/name") as caught:
        check_library(Remote(name="org/name"))
    assert caught.value.code == "C625"
    assert "pip install datasets" in caught.value.hint
