"""Hugging Face config.json: shapes of real models, their published counts, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cost_models.catalog import find_model
from cost_models.errors import TitanPlanError
from cost_models.hf_config import SUPPORTED_MODEL_TYPES, hf_notes, load_hf_config, parse_hf_config
from cost_models.model import ModelSpec


def config(
    model_type: str, hidden: int, layers: int, heads: int, kv_heads: int | None, ffn: int, vocab: int, **rest: object
) -> dict[str, object]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        **rest,
    }


DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
YARN = {"rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}}
QWEN = {"rope_theta": 1e6, "rms_norm_eps": 1e-6}
QWEN_WINDOW = {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28}
CONFIGS = {
    "llama2-7b": config("llama", 4096, 32, 32, None, 11008, 32000, max_position_embeddings=4096, rms_norm_eps=1e-5),
    "llama2-70b": config("llama", 8192, 80, 64, 8, 28672, 32000, max_position_embeddings=4096, rms_norm_eps=1e-5),
    "llama3.1-405b": config(
        "llama", 16384, 126, 128, 8, 53248, 128256, max_position_embeddings=131072, attention_bias=False,
        rope_theta=500000.0, rms_norm_eps=1e-5,
        rope_scaling={"rope_type": "llama3", "original_max_position_embeddings": 8192},
    ),
    "qwen2.5-0.5b": config("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True, **QWEN_WINDOW, **QWEN),
    "qwen2.5-72b": config("qwen2", 8192, 80, 64, 8, 29568, 152064, max_position_embeddings=131072,
                          rope_theta=1e6, rms_norm_eps=1e-5),
    "qwen3-0.6b": config(
        "qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True, max_position_embeddings=40960,
        **QWEN,
    ),
    "qwen3-32b": config("qwen3", 5120, 64, 64, 8, 25600, 151936, attention_bias=False, **QWEN),
    "qwen3-30b-a3b": config(
        "qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[], **QWEN,
    ),
    "mixtral-8x22b": config(
        "mixtral", 6144, 56, 48, 8, 16384, 32000, num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
        max_position_embeddings=65536,
    ),
    "deepseek-v2-lite": config(
        "deepseek_v2", 2048, 27, 16, 16, 10944, 102400, q_lora_rank=None, n_routed_experts=64, num_experts_per_tok=6,
        n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1, moe_layer_freq=1,
        max_position_embeddings=163840, **DEEPSEEK, **YARN,
    ),
    "deepseek-v3": config(
        "deepseek_v3", 7168, 61, 128, 128, 18432, 129280, q_lora_rank=1536, n_routed_experts=256,
        num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3,
        topk_method="noaux_tc", num_nextn_predict_layers=1, max_position_embeddings=163840, **DEEPSEEK, **YARN,
    ),
    "gpt2-1.5b": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024,
                  "vocab_size": 50257, "n_inner": None},
    "bloom-176b": {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112,
                   "vocab_size": 250880},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_model_of_the_catalogue(name: str) -> None:
    got = parse_hf_config(CONFIGS[name], f"hub/{name}/config.json")
    assert got == find_model(name)


@pytest.mark.parametrize(
    ("kind", "theta", "epsilon"),
    [("llama", 1e4, 1e-6), ("mistral", 1e4, 1e-6), ("qwen2", 1e4, 1e-6), ("mixtral", 1e6, 1e-5)],
)
def test_rotary_base_and_epsilon_default_as_in_transformers(kind: str, theta: float, epsilon: float) -> None:
    got = parse_hf_config(small(kind, num_local_experts=4, num_experts_per_tok=2), "m/config.json")
    assert (got.rope_theta, got.norm_epsilon) == (theta, epsilon)


@pytest.mark.parametrize(
    "values", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}]
)
def test_the_rotary_base_is_read_from_both_places(values: dict[str, object]) -> None:
    assert parse(**values).rope_theta == 5e5
    assert not hf_notes(small(**values))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_rotary_angles_are_noted(key: str) -> None:
    (note,) = hf_notes(small(**{key: {"rope_type": "llama3", "factor": 8.0}}))
    assert "rope_scaling llama3 is left out" in note


@pytest.mark.parametrize(("key", "value"), [("rms_norm_eps", "1e-5"), ("rope_theta", -1.0), ("rope_theta", 10**400)])
def test_a_rotary_base_or_epsilon_that_is_none_is_refused(key: str, value: object) -> None:
    with pytest.raises(TitanPlanError, match=key):
        parse(**{key: value})


@pytest.mark.parametrize(
    ("values", "published"),
    [
        (
            config("qwen2_moe", 2048, 24, 16, 16, 5632, 151936, num_experts=60, num_experts_per_tok=4,
                   moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
            14_315_784_192,
        ),  # Qwen/Qwen1.5-MoE-A2.7B
        (config("internlm2", 4096, 32, 32, 8, 14336, 92544, bias=False), 7_737_708_544),  # internlm/internlm2-7b
    ],
)  # fmt: skip
def test_architectures_outside_the_catalogue_have_the_published_count(values: object, published: float) -> None:
    assert parse_hf_config(values, "c/config.json").total_params == published


def small(model_type: object = "llama", **rest: object) -> dict[str, object]:
    return {**config("", 64, 4, 4, 2, 96, 100, **rest), "model_type": model_type}


def parse(**rest: object) -> ModelSpec:
    return parse_hf_config(small(**rest), "m/config.json")


def test_head_dim_may_differ_from_the_quotient() -> None:
    assert parse(head_dim=32).head_dim == 32
    assert parse(head_dim=None).head_dim == 16


def test_biases_are_read() -> None:
    spec = parse(attention_bias=True, mlp_bias=True)
    assert (spec.qkv_bias, spec.attention_out_bias, spec.mlp_bias) == (True, True, True)
    assert parse(model_type="qwen2").qkv_bias
    assert not parse(model_type="qwen2").attention_out_bias


def test_mistral_has_a_window_unless_it_is_null() -> None:
    assert parse(model_type="mistral").sliding_window == 4096
    assert parse(model_type="mistral", sliding_window=512).sliding_window == 512
    assert parse(model_type="mistral", sliding_window=None).sliding_window == 0


@pytest.mark.parametrize(("first", "window"), [(0, 512), (4, 0), (28, 0)])
def test_the_window_of_qwen_counts_only_when_it_is_used_in_all_layers(first: int, window: int) -> None:
    spec = parse(model_type="qwen2", use_sliding_window=True, sliding_window=512, max_window_layers=first)
    assert spec.sliding_window == window


def test_shapes_that_a_model_cannot_hold_are_refused_with_the_reason() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    deepseek = {**DEEPSEEK, "n_routed_experts": 4}
    for values, words in [
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}, "layers 2 to 3"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2, **moe}, "decoder_sparse_step is 2"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [3], **moe}, "only leading layers"),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 2, **deepseek}, "moe_layer_freq is 2"),
    ]:
        with pytest.raises(TitanPlanError, match=words) as caught:
            parse(**values)
        assert caught.value.code == "C607"


def test_leading_dense_layers_of_a_qwen_moe_are_kept() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    assert parse(model_type="qwen3_moe", mlp_only_layers=[1, 0], **moe).dense_layers == 2


def test_a_deepseek_without_experts_is_dense() -> None:
    spec = parse(model_type="deepseek_v2", n_routed_experts=None, q_lora_rank=8, **DEEPSEEK)
    assert spec.moe is None
    assert spec.head_dim == 128


def test_only_one_method_of_deepseek_v3_has_a_router_bias() -> None:
    rest = {**DEEPSEEK, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    with_bias = parse(model_type="deepseek_v3", **rest)
    without = parse(model_type="deepseek_v3", topk_method="greedy", **rest)
    assert with_bias.router_params - without.router_params == 4


@pytest.mark.parametrize("model_type", ["phi3", "llama4", None, 7, "", "LLAMA"])
def test_an_unknown_architecture_lists_the_supported_ones(model_type: object) -> None:
    with pytest.raises(TitanPlanError) as caught:
        parse(model_type=model_type)
    assert caught.value.code == "C607"
    assert all(name in caught.value.hint for name in SUPPORTED_MODEL_TYPES)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", "4096", "hidden_size is '4096' (text)"),
        ("hidden_size", None, "hidden_size is missing"),
        ("vocab_size", True, "vocab_size is True (flag)"),
        ("intermediate_size", [1], "intermediate_size is [1] (list)"),
        ("num_hidden_layers", 2.5, "num_hidden_layers is 2.5"),
        ("num_hidden_layers", float("nan"), "num_hidden_layers is nan"),
        ("num_hidden_layers", float("inf"), "num_hidden_layers is inf"),
        ("num_hidden_layers", 0, "n_layers is 0"),
        ("num_attention_heads", 0, "is no whole number"),
        ("num_attention_heads", 5, "hidden_size 64 / num_attention_heads 5"),
        ("num_key_value_heads", 3, "n_kv_heads 3"),
        ("tie_word_embeddings", "no", "tie_word_embeddings is 'no' (text)"),
    ],
)
def test_nonsense_is_named_with_file_key_and_value(key: str, value: object, words: str) -> None:
    with pytest.raises(TitanPlanError) as caught:
        parse_hf_config({**small(), key: value}, "m/config.json")
    assert caught.value.message.startswith("m/config.json")
    assert words in caught.value.message


@pytest.mark.parametrize("values", [[], None, 3, "text"])
def test_a_config_that_is_no_object_is_refused(values: object) -> None:
    with pytest.raises(TitanPlanError, match="JSON object"):
        parse_hf_config(values, "m/config.json")


def test_a_file_and_its_folder_give_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model-7B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small()), encoding="utf-8")
    assert load_hf_config(folder) == load_hf_config(folder / "config.json")
    assert load_hf_config(folder).name == "My-Model-7B"


def test_a_config_may_name_its_model() -> None:
    assert parse(_name_or_path="meta-llama/Llama-2-7b-hf").name == "Llama-2-7b-hf"
    assert parse(_name_or_path="./").name == "m"


@pytest.mark.parametrize(
    ("text", "words"), [("{", ":1:2:"), ('{"a": 1,}', "config.json:1:"), ("[" * 99999, "config.json"), ("", "empty")]
)
def test_broken_json_is_placed(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(TitanPlanError, match=words) as caught:
        load_hf_config(tmp_path)
    assert caught.value.code in {"C603", "C604"}


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(TitanPlanError, match=r"config.json: there is no such file"):
        load_hf_config(tmp_path)
