"""A folder that cannot be trained from is refused, with what is wrong, before any process group and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cost_models.errors import TitanPlanError
from cost_models.hf_config import load_hf_config
from cost_models.model import ModelSpec
from runtime.hf_folder import check_hf
from tests.runtime.hf.folders import CONFIGS, shapes_of, write_folder

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_is_found_in_its_file(tmp_path: Path, name: str, files: int) -> None:
    found = check_hf(write_folder(tmp_path, name, files), load_hf_config(tmp_path))
    assert set(found.files) == set(shapes_of(CONFIGS[name]))
    assert len(set(found.files.values())) == files
    assert found.notes == ()


def refusal(folder: Path, model: ModelSpec) -> TitanPlanError:
    with pytest.raises(TitanPlanError) as caught:
        check_hf(str(folder), model)
    return caught.value


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    weights = load_file(folder / SINGLE)
    change(weights)
    save_file(weights, folder / SINGLE)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    error = refusal(tmp_path / "nowhere", load_hf_config(write_folder(tmp_path / "a", "llama")))
    assert (error.code, error.exit_code) == ("C661", 2)
    assert "nowhere is no folder" in error.message


def test_another_model_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    here = replace(load_hf_config(write_folder(tmp_path, "llama")), n_layers=3, rope_theta=5e5, name="mine", seq_len=9)
    error = refusal(tmp_path, here)
    assert error.code == "C662"
    assert error.message.endswith(
        "another model than mine: n_layers 2 there, 3 here; rope_theta 100 there, 500000 here"
    )
    assert f"hf_config: {tmp_path}/config.json" in error.hint


def test_the_width_of_a_dense_mlp_does_not_count_where_no_layer_has_one(tmp_path: Path) -> None:
    model = load_hf_config(write_folder(tmp_path, "qwen2-moe"))
    assert check_hf(tmp_path, replace(model, ffn_dim=1))
    assert model.moe is not None
    assert refusal(tmp_path, replace(model, moe=replace(model.moe, ffn_dim=1))).code == "C662"


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("llama", {"model_type": "gpt2", "n_embd": 64}, "model_type 'gpt2'"),
        ("llama", {"model_type": ["llama"]}, "model_type ['llama']"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', the trainer computes with 'silu'"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method': 'fp8'}"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("qwen3-moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen2-moe", {"norm_topk_prob": None}, "norm_topk_prob is missing"),
    ],
)
def test_what_the_decoder_computes_otherwise_is_refused(
    tmp_path: Path, name: str, values: dict[str, object], words: str
) -> None:
    model = load_hf_config(write_folder(tmp_path, name))
    change_config(tmp_path, **values)
    error = refusal(tmp_path, model)
    assert error.code == "C660"
    assert words in error.message


def test_scaled_angles_are_noted(tmp_path: Path) -> None:
    model = load_hf_config(write_folder(tmp_path, "llama"))
    change_config(tmp_path, rope_scaling={"rope_type": "llama3", "factor": 8.0})
    (note,) = check_hf(tmp_path, model).notes
    assert "llama3" in note


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = load_hf_config(write_folder(tmp_path, "llama"))
    change_weights(tmp_path, lambda weights: [weights.pop(n) for n in list(weights) if "layers.1" in n])
    error = refusal(tmp_path, model)
    assert error.code == "C661"
    assert "model.layers.1.input_layernorm.weight" in error.message
    assert "and 5 more" in error.message


def test_a_wrong_shape_shows_both(tmp_path: Path) -> None:
    model = load_hf_config(write_folder(tmp_path, "llama"))
    change_weights(tmp_path, lambda weights: weights.update({"model.norm.weight": np.zeros(3, np.float32)}))
    error = refusal(tmp_path, model)
    assert error.code == "C662"
    assert "model.norm.weight (3,) instead of (64,)" in error.message


def test_numbers_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    model = load_hf_config(write_folder(tmp_path, "llama"))
    change_weights(tmp_path, lambda weights: weights.update({"model.norm.weight": np.zeros(64, np.int8)}))
    error = refusal(tmp_path, model)
    assert (error.code, "model.norm.weight (I8)" in error.message) == ("C660", True)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 7, b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"[]", b"\x06" + b"\x00" * 7 + b'{"a":1', b"not a model"],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    model = load_hf_config(write_folder(tmp_path, "llama"))
    (tmp_path / SINGLE).write_bytes(content)
    error = refusal(tmp_path, model)
    assert (error.code, "no safetensors file" in error.message) == ("C661", True)


def test_a_download_that_stopped_early_is_refused(tmp_path: Path) -> None:
    model = load_hf_config(write_folder(tmp_path, "llama"))
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:-1])
    assert "ends before its last tensor" in refusal(tmp_path, model).message


def test_a_file_of_the_index_that_is_not_there_is_named(tmp_path: Path) -> None:
    model = load_hf_config(write_folder(tmp_path, "llama", files=3))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(tmp_path, model).message


@pytest.mark.parametrize("placed", [None, [], {"a": 1}, {"a": "../b.safetensors"}, {"a": "/etc/passwd"}])
def test_an_index_names_files_beside_it_only(tmp_path: Path, placed: object) -> None:
    model = load_hf_config(write_folder(tmp_path, "llama"))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": placed}))
    error = refusal(tmp_path, model)
    assert (error.code, "weight_map" in error.message) == ("C661", True)


def test_a_folder_without_safetensors_says_what_is_read(tmp_path: Path) -> None:
    model = load_hf_config(write_folder(tmp_path, "llama"))
    (tmp_path / SINGLE).rename(tmp_path / "pytorch_model.bin")
    error = refusal(tmp_path, model)
    assert (error.code, "*.bin files are not read" in error.hint) == ("C661", True)


def test_the_check_needs_no_torch() -> None:
    code = "import sys, runtime.hf_weights, runtime.hf_export; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
