"""Ranks that are killed, and disks that fill up, never take the last good checkpoint with them."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest

from tests.ranks import RankError
from tests.runtime.checkpoint_runs import resumed, saved_on_full_disk, saved_then_killed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool

MODEL = {"name": "tiny", "n_layers": 1}
LAYOUT: dict[str, dict[str, Any]] = {
    "training": {"seq_len": 16},
    "distributed": {"dp_size": 2},
    "optimization": {"zero_stage": 2},
}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "all"])
def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before(
    ranks: RankPool, tmp_path: Path, victims: tuple[int, ...]
) -> None:
    with pytest.raises(RankError):
        ranks.run(2, saved_then_killed, MODEL, LAYOUT, str(tmp_path), victims)
    assert "step-00000001" in names(tmp_path)
    assert "step-00000002" not in names(tmp_path)
    again = ranks.run(2, resumed, MODEL, LAYOUT, str(tmp_path), 3)
    assert [start for start, _, _ in again] == [1, 1]
    assert names(tmp_path) == ["step-00000001"]
    undisturbed = ranks.run(2, resumed, MODEL, LAYOUT, str(tmp_path / "empty"), 3)
    assert [found[2] for found in again] == [found[2] for found in undisturbed]
    assert again[0][1] == undisturbed[0][1][1:]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_and_training_goes_on_until_the_last_save(
    ranks: RankPool, tmp_path: Path, number: int
) -> None:
    told = ranks.run(2, saved_on_full_disk, MODEL, LAYOUT, str(tmp_path), 1, number)
    found, other = told
    assert found.keys() == other.keys()
    assert all(found[key] == other[key] for key in found if key.startswith("names"))
    assert found["names 1"] == ["step-00000001"]
    assert found["names 2"] == ["step-00000001"]
    assert found["names 3"] == ["step-00000001", "step-00000003"]
    assert found["names 4"] == ["step-00000001", "step-00000003"]
    assert "error 2" not in found
    assert "error 3" not in found
    assert "R752" in found["error 4"]
    assert "R752" in found["error at the end"]
