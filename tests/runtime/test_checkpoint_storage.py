"""What DCP writes is read back, and a file that was damaged or forged is an error, never code that runs."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cost_models.errors import TitanPlanError
from runtime.checkpoint_ranks import Ranks
from runtime.checkpoint_storage import Part, file_of, read_parts, write_parts

if TYPE_CHECKING:
    from pathlib import Path

VALUES = torch.arange(60.0).view(6, 10)


def part(
    tensor: torch.Tensor, offset: tuple[int, ...] = (0, 0), shape: tuple[int, ...] = (6, 10), key: str = "w"
) -> Part:
    return Part(key=key, shape=shape, offset=offset, tensor=tensor)


def written(folder: Path) -> Path:
    write_parts([part(VALUES.clone())], folder, Ranks(alone=True))
    return folder


def read(parts: list[Part], folder: Path) -> None:
    read_parts(parts, folder, Ranks(alone=True))


def test_any_box_is_read_from_the_whole(tmp_path: Path) -> None:
    box, twin = torch.zeros(2, 3), torch.zeros(2, 3)
    read([part(box, (1, 4)), part(twin, (1, 4))], written(tmp_path))
    assert torch.equal(box, VALUES[1:3, 4:7])
    assert torch.equal(twin, box)


def test_a_view_is_read_in_place(tmp_path: Path) -> None:
    whole = torch.full((8, 10), -1.0)
    read([part(whole.narrow(0, 0, 6))], written(tmp_path))
    assert torch.equal(whole[:6], VALUES)
    assert whole[6:].eq(-1).all()


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (part(torch.zeros(6, 10), key="v"), "v is missing"),
        (part(torch.zeros(6, 11), shape=(6, 11)), r"w is \(6, 10\), \(6, 11\) is needed"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, wanted: Part, told: str) -> None:
    with pytest.raises(TitanPlanError, match=f"R754.*{told}"):
        read([wanted], written(tmp_path))


@pytest.mark.parametrize("name", [file_of(0), ".metadata"])
@pytest.mark.parametrize("harm", ["cut", "emptied", "overwritten", "gone"])
def test_a_damaged_file_is_an_error_that_names_the_checkpoint(tmp_path: Path, name: str, harm: str) -> None:
    file = written(tmp_path) / name
    data = file.read_bytes()
    changed = {"cut": data[: len(data) // 2], "emptied": b"", "overwritten": b"\x00" * len(data), "gone": data}[harm]
    file.write_bytes(changed)
    if harm == "gone":
        file.unlink()
    with pytest.raises(TitanPlanError) as caught:
        read([part(torch.zeros(6, 10))], tmp_path)
    assert caught.value.code == "R754"
    assert str(tmp_path) in caught.value.message
    assert caught.value.exit_code == 2


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def test_a_forged_metadata_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (written(tmp_path) / ".metadata").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(TitanPlanError, match=r"R754.*asks for posix\.mkdir"):
        read([part(torch.zeros(6, 10))], tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_a_forged_tensor_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path) / file_of(0)
    torch.save(_Bomb(), file)
    with pytest.raises(TitanPlanError, match="R754"):
        read([part(torch.zeros(6, 10))], tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_metadata_that_points_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path) / ".metadata"
    metadata = pickle.loads(file.read_bytes())  # noqa: S301 - written two lines above
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(TitanPlanError, match=r"points to \.\./elsewhere"):
        read([part(torch.zeros(6, 10))], tmp_path)
