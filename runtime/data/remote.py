"""Texts of a data set of the Hugging Face Hub, by the optional `datasets` library: the only part that goes online."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cost_models.errors import TitanPlanError
from cost_models.yaml_numbers import cut

from .complaints import reason

if TYPE_CHECKING:
    from .sources import Remote


def check_library(remote: Remote) -> None:
    """The library is there.

    Raises:
        TitanPlanError: C625.
    """
    if find_spec("datasets") is None:
        problem = f"training.dataset: {remote.name} is not on this machine; from the Hub it needs the library datasets"
        hint = "pip install datasets, or set training.dataset.path to a file or folder of this machine"
        raise TitanPlanError("C625", problem, hint)


def remote_texts(remote: Remote, text_key: str) -> Iterator[str]:
    """Documents of the train split, streamed.

    Raises:
        TitanPlanError: C625 no library; C622 no such column; C626 the library's own complaint.
    """
    check_library(remote)
    try:
        rows = import_module("datasets").load_dataset(
            remote.name, remote.config or None, revision=remote.revision or None, split="train", streaming=True
        )
        for row in rows:
            yield _text_of(row, text_key, remote)
    except TitanPlanError:
        raise
    except Exception as error:  # noqa: BLE001 - anything that a network and a library may raise
        problem = f"{remote.name}: datasets could not load it ({type(error).__name__}: {reason(error)})"
        hint = "check the name and the network; or download it elsewhere, save_to_disk, and set training.dataset.path"
        raise TitanPlanError("C626", problem, hint) from None


def _text_of(row: dict[str, object], text_key: str, remote: Remote) -> str:
    text = row.get(text_key, 0)
    if not isinstance(text, str | None):
        keys = cut(", ".join(row), 200)
        hint = "set training.dataset.text_key to the column of the text"
        raise TitanPlanError("C622", f"{remote.name}: no column {text_key!r} with text; columns: {keys}", hint)
    return text or ""
