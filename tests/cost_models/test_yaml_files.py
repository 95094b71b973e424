"""Models, clusters, calibrations and configs are read alike: the same broken file is the same error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cost_models.calibration import load_calibration
from cost_models.cluster_files import load_cluster_file
from cost_models.errors import TitanPlanError
from cost_models.model_files import load_model_file
from cost_models.yaml_files import parse_yaml, read_mapping
from runtime.config import load_config

LOADERS = (load_model_file, load_cluster_file, load_calibration, load_config)


@pytest.mark.parametrize("load", LOADERS, ids=lambda load: load.__name__)
@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("", "C603", "is empty"),
        ("name: [", "C604", "file.yaml:2:1: "),
        ("name: a\nname: b\n", "C604", "file.yaml:2:1: key name is given twice"),
        ("- 1\n", "C606", "key: value|mapping"),
        ("nmae: a\n", "C605", "nmae"),
    ],
)
def test_a_broken_file_is_the_same_error_everywhere(
    tmp_path: Path, load: Callable[[Path], object], text: str, code: str, words: str
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TitanPlanError, match=words) as caught:
        load(path)
    assert (caught.value.code, caught.value.exit_code) == (code, 2)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("load", LOADERS, ids=lambda load: load.__name__)
def test_a_folder_and_a_missing_file_are_told_apart(tmp_path: Path, load: Callable[[Path], object]) -> None:
    with pytest.raises(TitanPlanError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(TitanPlanError, match="no such file"):
        load(tmp_path / "nowhere.yaml")


def test_keys_are_text_whatever_yaml_makes_of_them(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("7: a\non: b\n", encoding="utf-8")
    assert read_mapping(path) == {"7": "a", "True": "b"}


@pytest.mark.parametrize(
    "value",
    [
        '!!int ""',
        '!!int "+"',
        '!!float ""',
        "!!bool foo",
        "!!timestamp foo",
        "!!int 0x",
        "2024-99-99",
        "0x" + "f" * 5000,
    ],
)
def test_a_value_that_its_tag_cannot_read_is_placed(value: str) -> None:
    with pytest.raises(TitanPlanError, match=r"^error\[C604\]: my.yaml:2:4: ") as caught:
        parse_yaml(f"a: 1\nb: {value}\n", "my.yaml")
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("text", [f"a: !!{'x' * 9999} b", f"a: !!bool {'x' * 9999}", f"{'k' * 900}: 1\n{'k' * 900}: 2"])
def test_a_complaint_repeats_little_of_the_file(text: str) -> None:
    with pytest.raises(TitanPlanError) as caught:
        parse_yaml(text, "my.yaml")
    assert caught.value.code == "C604"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("load", LOADERS[:3], ids=lambda load: load.__name__)
def test_a_long_unknown_key_with_escape_codes_is_cut_and_told(tmp_path: Path, load: Callable[[Path], object]) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(f'"\\e[31m{"x" * 900}": 1\n', encoding="utf-8")
    with pytest.raises(TitanPlanError) as caught:
        load(path)
    assert caught.value.code == "C605"
    assert caught.value.hint
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < len(str(path)) + 130


@pytest.mark.parametrize("load", LOADERS[:3], ids=lambda load: load.__name__)
def test_aliases_that_grow_without_end_stay_small(tmp_path: Path, load: Callable[[Path], object]) -> None:
    lines = ["name: &a0 [x, x]"]
    lines += [f"k{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    path = tmp_path / "file.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(TitanPlanError):
        load(path)
