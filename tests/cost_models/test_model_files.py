"""Model files: what is read, and that every complaint names file, key and what was got."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cost_models.catalog import find_model, list_models
from cost_models.errors import TitanPlanError
from cost_models.model import MlaSpec, ModelSpec, MoeSpec
from cost_models.model_files import ModelEntry, dump_model, load_entry, load_model_file, parse_model

SIZES: Final[dict[str, Any]] = {"hidden_dim": 64, "n_layers": 2, "n_heads": 4, "ffn_dim": 96, "vocab_size": 100}
TEXT = "".join(f"{key}: {value}\n" for key, value in SIZES.items())


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def complaint(values: object) -> TitanPlanError:
    with pytest.raises(TitanPlanError) as caught:
        parse_model(values, "mine.yaml")
    return caught.value


def test_a_file_needs_sizes_only(tmp_path: Path) -> None:
    spec = load_model_file(write(tmp_path, TEXT))
    assert spec == ModelSpec(name="mine", n_kv_heads=4, head_dim=16, **SIZES)


def test_the_keys_of_a_catalogue_file_are_accepted(tmp_path: Path) -> None:
    text = TEXT + "family: f\nsize: 7\naliases: [a, b]\npublished_parameters: 1e6\nsource: mine\n"
    entry = load_entry(write(tmp_path, text))
    assert (entry.family, entry.size, entry.aliases, entry.published_parameters) == ("f", "7", ("a", "b"), 10**6)
    assert entry.spec == load_model_file(tmp_path / "mine.yaml")


@pytest.mark.parametrize("spelled", ["1e4", "10000", "'10000'", "10_000", "1.0e+4", "10000.0", "' 1e4 '"])
def test_numbers_may_be_spelled_as_people_do(tmp_path: Path, spelled: str) -> None:
    assert load_model_file(write(tmp_path, TEXT + f"seq_len: {spelled}\n")).seq_len == 10000


@pytest.mark.parametrize("spelled", ["5e5", "500000", "'500000.0'"])
def test_numbers_with_a_fraction_may_be_spelled_so_too(tmp_path: Path, spelled: str) -> None:
    spec = load_model_file(write(tmp_path, TEXT + f"rope_theta: {spelled}\nnorm_epsilon: 1e-6\n"))
    assert (spec.rope_theta, spec.norm_epsilon) == (5e5, 1e-6)
    assert parse_model(dump_model(spec), "mine.yaml") == spec


@pytest.mark.parametrize(
    ("key", "wrong", "code"),
    [("rope_theta", "many", "C606"), ("rope_theta", True, "C606"), ("norm_epsilon", "nan", "C606")]
    + [
        (key, value, "C610")
        for key, value in (("rope_theta", 1), ("rope_theta", -5e5), ("norm_epsilon", 0), ("norm_epsilon", 1))
    ],
)
def test_a_rotary_base_or_epsilon_that_no_model_has_is_refused(key: str, wrong: object, code: str) -> None:
    error = complaint({**SIZES, key: wrong})
    assert (error.code, f"{key} is " in error.message) == (code, True)


@pytest.mark.parametrize("wrong", ["many", 1.5, True, None, [1], {"a": 1}, "1e999", float("nan"), "nan", ""])
def test_a_wrong_number_is_named_with_what_was_got(wrong: object) -> None:
    error = complaint({**SIZES, "seq_len": wrong})
    assert error.code == "C606"
    assert error.message.startswith("mine.yaml: seq_len is ")


def test_a_number_of_any_length_is_only_wrong_never_a_crash() -> None:
    assert complaint({**SIZES, "vocab_size": 10**400}).code == "C610"
    assert complaint({**SIZES, "seq_len": "9" * 5000}).code == "C606"


@pytest.mark.parametrize("wrong", ["true", 1, None, "yes"])
def test_a_wrong_flag_is_named_with_what_was_got(wrong: object) -> None:
    error = complaint({**SIZES, "qkv_bias": wrong})
    assert "qkv_bias is" in error.message
    assert "true or false" in error.message


def test_a_wrong_choice_names_the_right_ones() -> None:
    error = complaint({**SIZES, "norm": "batchnorm"})
    assert "'batchnorm'" in error.message
    assert "rmsnorm, layernorm" in error.hint


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    error = complaint({**SIZES, "n_layer": 3})
    assert (error.code, error.hint) == ("C605", "did you mean n_layers?")
    assert "n_layer" in error.message
    assert "known keys" in complaint({**SIZES, "zzz": 3}).hint


def test_an_unknown_nested_key_is_named_with_its_section() -> None:
    error = complaint({**SIZES, "moe": {"experts": 4, "topk": 2, "ffn_dim": 8}})
    assert error.message == "mine.yaml: unknown key moe.topk"
    assert error.hint == "did you mean moe.top_k?"


@pytest.mark.parametrize("section", ["moe", "mla"])
def test_a_section_that_is_no_map_is_refused(section: str) -> None:
    assert section in complaint({**SIZES, section: 3}).message


def test_missing_keys_are_all_named() -> None:
    error = complaint({"n_layers": 2, "moe": {"experts": 4}})
    assert "hidden_dim, n_heads, n_kv_heads, ffn_dim, vocab_size missing" in error.message


def test_a_value_that_no_model_has_is_named_with_the_file() -> None:
    assert complaint({**SIZES, "n_layers": -1}).message == "mine.yaml: n_layers is -1"
    moe = {"experts": 2, "top_k": 3, "ffn_dim": 8}
    assert complaint({**SIZES, "moe": moe}).message.startswith("mine.yaml: moe.")


def test_a_head_size_that_cannot_be_derived_is_asked_for() -> None:
    assert complaint({**SIZES, "n_heads": 5}).hint == "give head_dim"


@pytest.mark.parametrize(("text", "place"), [("a: [1\nb: 2", ":2:"), ("a: 1\n  b: 2\n", ":2:"), ("\tx: 1", ":1:1")])
def test_broken_yaml_is_placed_by_line_and_column(tmp_path: Path, text: str, place: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TitanPlanError) as caught:
        load_model_file(path)
    assert caught.value.code == "C604"
    assert caught.value.message.startswith(f"{path}{place}")


@pytest.mark.parametrize("text", ["a: 2024-99-99", "a: \x01", "[" * 50_000, "? [a]\n: 1", "!!python/name:os.system"])
def test_hostile_yaml_is_an_error_of_ours(tmp_path: Path, text: str) -> None:
    with pytest.raises(TitanPlanError) as caught:
        load_model_file(write(tmp_path, text))
    assert caught.value.code in {"C604", "C605", "C606"}


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT + "n_layers: 3\n")
    with pytest.raises(TitanPlanError, match=r"mine.yaml:6:1: key n_layers is given twice"):
        load_model_file(path)


@pytest.mark.parametrize("text", ["- 1\n", "just text", "3"])
def test_a_file_that_is_no_map_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TitanPlanError, match="key: value"):
        load_model_file(write(tmp_path, text))


@pytest.mark.parametrize("text", ["", "  \n", "\ufeff"])
def test_an_empty_file_is_called_empty(tmp_path: Path, text: str) -> None:
    with pytest.raises(TitanPlanError, match="is empty"):
        load_model_file(write(tmp_path, text))


def test_a_missing_file_a_folder_and_a_binary_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path, words in [("none.yaml", "no such file"), (".", "is a folder"), ("binary.yaml", "not UTF-8")]:
        with pytest.raises(TitanPlanError, match=words) as caught:
            load_model_file(tmp_path / path)
        assert caught.value.code == "C603"


def test_a_published_number_needs_a_source(tmp_path: Path) -> None:
    with pytest.raises(TitanPlanError, match="no source"):
        load_entry(write(tmp_path, TEXT + "published_parameters: 1\n"))


@pytest.mark.parametrize("entry", list_models(), ids=lambda entry: entry.name)
def test_shipped_models_survive_dump_and_parse(entry: ModelEntry) -> None:
    assert parse_model(yaml.safe_load(yaml.safe_dump(dump_model(entry.spec))), "x.yaml") == entry.spec


sizes = st.integers(1, 10**6)
even = st.integers(1, 10**5).map(lambda half: 2 * half)  # rotary positions turn pairs
moes = st.builds(
    lambda top_k, idle, **rest: MoeSpec(top_k=top_k, experts=top_k + idle, **rest),
    top_k=st.integers(1, 16),
    idle=st.integers(0, 500),
    ffn_dim=sizes,
    shared_ffn_dim=st.integers(0, 10**5),
    shared_gate=st.booleans(),
    router_bias=st.booleans(),
)
mlas = st.builds(
    MlaSpec,
    q_lora_rank=st.integers(0, 4096),
    kv_lora_rank=sizes,
    qk_nope_head_dim=sizes,
    qk_rope_head_dim=even,
    v_head_dim=sizes,
)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    kv_heads = draw(st.integers(1, 64))
    numbers = ("hidden_dim", "ffn_dim", "vocab_size", "seq_len")
    flags = ("gated_mlp", "qkv_bias", "attention_out_bias", "mlp_bias", "qk_norm", "embedding_norm", "tied_embeddings")
    rest: dict[str, Any] = {key: draw(sizes) for key in numbers} | {key: draw(st.booleans()) for key in flags}
    return ModelSpec(
        name=draw(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=30)),
        n_layers=draw(st.integers(1, 10**4)),
        head_dim=draw(even),
        n_kv_heads=kv_heads,
        n_heads=kv_heads * draw(st.integers(1, 16)),
        position=draw(st.sampled_from(["rope", "learned", "alibi", "none"])),
        positions=draw(sizes),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        moe=draw(st.none() | moes),
        mla=draw(st.none() | mlas),
        sliding_window=draw(st.integers(0, 10**5)),
        **rest,
    )


@given(specs())
def test_any_model_survives_dump_and_parse(spec: ModelSpec) -> None:
    assert parse_model(dump_model(spec), "x.yaml") == spec


@given(specs())
def test_components_add_up_to_the_whole(spec: ModelSpec) -> None:
    layers = spec.dense_layers * spec.dense_layer_params + spec.moe_layers * spec.moe_layer_params
    assert spec.dense_layers + spec.moe_layers == spec.n_layers
    assert layers + spec.embedding_params + spec.norm_params + spec.head_params == spec.total_params
    assert 0 < spec.active_params <= spec.total_params


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=5), st.data())
def test_no_value_of_any_key_crashes(value: object, data: st.DataObject) -> None:
    good = dump_model(find_model("deepseek-v3"))
    key = data.draw(st.sampled_from(sorted(good)))
    with suppress(TitanPlanError):  # any other exception fails the test
        parse_model({**good, key: value}, "x.yaml")
