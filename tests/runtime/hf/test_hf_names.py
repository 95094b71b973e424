"""Names and shapes: ours against lists of the Hub's, and against the decoder itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cost_models.catalog import find_model, list_models
from cost_models.errors import TitanPlanError
from cost_models.hf_config import parse_hf_config
from cost_models.model import ModelSpec
from runtime.hf_config_writing import hf_config
from runtime.hf_names import FAMILIES, family_of, hf_tensors, whole_shapes
from runtime.models.attention_kernels import kernel_for
from runtime.models.building import Build
from runtime.models.decoder import Chunk, Decoder
from tests.runtime.hf.folders import CONFIGS, shapes_of

EXPORTED = [entry.name for entry in list_models() if not entry.spec.mla and entry.spec.norm == "rmsnorm"]


def spec_of(name: str) -> ModelSpec:
    return parse_hf_config(CONFIGS[name], f"{name}/config.json")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_of_the_hub_has_its_place_and_no_other_is_asked_for(name: str) -> None:
    model, wanted = spec_of(name), shapes_of(CONFIGS[name])
    found: dict[str, tuple[int, ...]] = {}
    for ours, shape in whole_shapes(model).items():
        tensors = hf_tensors(ours, FAMILIES[CONFIGS[name]["model_type"]], 4)
        assert not set(found) & set(tensors.names)
        found |= dict.fromkeys(tensors.names, shape[1:] if tensors.stacked else shape)
    assert found == wanted


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_are_those_of_the_decoder(name: str) -> None:
    model = spec_of(name)
    with torch.device("meta"):
        chunk = Chunk(layers=range(model.n_layers), first=True, last=True)
        decoder = Decoder(model, chunk, Build(kernel=kernel_for("cpu")))
    assert whole_shapes(model) == {name: tuple(p.shape) for name, p in decoder.named_parameters()}


@pytest.mark.parametrize("name", EXPORTED)
def test_shapes_hold_all_parameters_of_a_catalogue_model(name: str) -> None:
    model = find_model(name)
    assert sum(torch.Size(shape).numel() for shape in whole_shapes(model).values()) == model.total_params


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_recognised_by_what_it_is(name: str) -> None:
    assert family_of(spec_of(name)).model_type == CONFIGS[name]["model_type"]


@pytest.mark.parametrize("name", [*CONFIGS, *EXPORTED])
def test_the_config_that_is_written_describes_the_same_model(name: str) -> None:
    model = spec_of(name) if name in CONFIGS else find_model(name)
    written = hf_config(model, family_of(model), seq_len=model.seq_len, dtype="bfloat16")
    read = parse_hf_config(written, str(Path(model.name) / "config.json"))
    if model.moe is not None and not model.dense_layers:
        read = replace(read, ffn_dim=model.ffn_dim)
    # A length above 8192 is not taken for that of pre-training.
    assert replace(read, seq_len=model.seq_len) == model


BASE = spec_of("llama")
SPARSE = spec_of("mixtral")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (find_model("deepseek-v3"), "DeepSeek"),
        (find_model("gpt2-1.5b"), "RMSNorm"),
        (find_model("bloom-176b"), "RMSNorm"),
        (replace(BASE, attention_out_bias=True), "no architecture"),
        (replace(BASE, qk_norm=True, mlp_bias=True), "no architecture"),
        (replace(BASE, sliding_window=8, mlp_bias=True), "no architecture"),
        (replace(SPARSE, qkv_bias=True), "no architecture"),
        (replace(SPARSE, moe=replace(SPARSE.moe, dense_layers=1)), "no architecture"),
        (replace(SPARSE, moe=replace(SPARSE.moe, router_bias=True)), "no architecture"),
        (replace(SPARSE, moe=replace(SPARSE.moe, shared_ffn_dim=8)), "no architecture"),
    ],
)  # fmt: skip
def test_a_model_without_a_hugging_face_form_is_refused_with_the_reason(model: ModelSpec, reason: str) -> None:
    with pytest.raises(TitanPlanError, match=reason) as caught:
        family_of(model)
    assert caught.value.code == "C660"
    assert "mixtral" in caught.value.hint
