"""The catalogue: every name that users type leads to one model, every other to a helpful error."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.catalog import (
    find_cluster,
    find_model,
    find_model_by_size,
    list_clusters,
    list_models,
    model_names,
    spelling_key,
)
from cost_models.cluster import ClusterSpec
from cost_models.errors import TitanPlanError
from cost_models.model_files import ModelEntry, dump_model

EVERY_NAME = [(name, entry.name) for entry in list_models() for name in model_names(entry)]


@pytest.mark.parametrize(("name", "model"), EVERY_NAME)
def test_every_name_finds_its_model(name: str, model: str) -> None:
    assert find_model(name).name == model


def test_no_name_is_claimed_twice() -> None:
    owners = defaultdict(set)
    for name, model in EVERY_NAME:
        owners[spelling_key(name)].add(model)
    assert {name: models for name, models in owners.items() if len(models) > 1} == {}


def test_a_model_lies_in_the_file_of_its_name(request: pytest.FixtureRequest) -> None:
    files = (request.config.rootpath / "configs" / "models").glob("*.yaml")
    assert {file.stem for file in files} == {entry.name for entry in list_models()}


@pytest.mark.parametrize("entry", list_models(), ids=lambda entry: entry.name)
def test_family_and_size_find_the_model(entry: ModelEntry) -> None:
    assert find_model_by_size(entry.family, entry.size) is entry.spec


@pytest.mark.parametrize(
    ("size", "model"),
    [
        ("7B", "llama2-7b"),
        ("13B", "llama2-13b"),
        ("34B", "llama2-34b"),
        ("70B", "llama2-70b"),
        ("8B", "llama3.1-8b"),
        ("405B", "llama3.1-405b"),
        ("175B", "gpt3-175b"),
        ("176B", "bloom-176b"),
        ("135B", "pangu-ultra-135b"),
        ("30B-A3B", "qwen3-30b-a3b"),
        ("235B-A22B", "qwen3-235b-a22b"),
        ("671B", "deepseek-v3"),
        ("236B", "deepseek-v2"),
        ("8x7B", "mixtral-8x7b"),
        ("8x22B", "mixtral-8x22b"),
        ("meta-llama/Llama-2-70b-hf", "llama2-70b"),
        ("LLAMA_2 70b", "llama2-70b"),
        ("Qwen2.5 0.5B", "qwen2.5-0.5b"),
    ],
)
def test_what_users_type_is_understood(size: str, model: str) -> None:
    assert find_model(size).name == model


@pytest.mark.parametrize(
    ("family", "size", "model"),
    [
        ("LLaMA", "70B", "llama2-70b"),
        ("llama2", "7B", "llama2-7b"),
        ("llama", "405b", "llama3.1-405b"),
        ("Llama-2", "13B", "llama2-13b"),
        ("Llama3", "70B", "llama3.1-70b"),
        ("llama-3.1", "8B", "llama3.1-8b"),
        ("meta-llama/Llama-2-70b-hf", "70B", "llama2-70b"),
        ("tiny", "", "tiny"),
        ("tiny-moe", " ", "tiny-moe"),
        ("DeepSeek", "671B", "deepseek-v3"),
    ],
)
def test_the_users_guide_names_models_by_family_and_size(family: str, size: str, model: str) -> None:
    assert find_model_by_size(family, size).name == model


def test_llama_70b_is_what_the_users_guide_writes() -> None:
    spec = find_model_by_size("LLaMA", "70B")
    assert (spec.vocab_size, spec.hidden_dim, spec.n_layers, spec.n_heads) == (32000, 8192, 80, 64)


def test_the_small_models_are_what_programs_rely_on() -> None:
    dense, sparse = find_model("tiny"), find_model("tiny-moe").moe
    assert sparse is not None
    assert (dense.n_layers, dense.n_heads, dense.n_kv_heads, dense.vocab_size) == (4, 8, 4, 512)
    assert (sparse.experts, sparse.top_k) == (4, 2)


@pytest.mark.parametrize("apart", [("qwen2.5-7b", "qwen2-57b"), ("qwen2.5-1.5b", "qwen2.5-15b"), ("8x7b", "87b")])
def test_separators_between_digits_count(apart: tuple[str, str]) -> None:
    assert len({spelling_key(name) for name in apart}) == 2


@given(st.sampled_from(EVERY_NAME), st.sampled_from([str.upper, str.lower, str.title]), st.sampled_from("-_ ."))
def test_case_and_separator_do_not_matter(pair: tuple[str, str], case: Callable[[str], str], separator: str) -> None:
    spelled = "".join(separator if letter in "-_ ." else letter for letter in pair[0])
    assert find_model(case(f" {spelled} ")).name == pair[1]


@given(st.text())
def test_a_key_is_its_own_key(name: str) -> None:
    assert spelling_key(spelling_key(name)) == spelling_key(name)


@pytest.mark.parametrize(
    ("name", "near"), [("lama2-70b", "llama2-70b"), ("32B", "qwen2.5-32b, qwen3-32b"), ("mixtral-8x8b", "mixtral-8x7b")]
)
def test_an_unknown_model_names_the_nearest_and_the_command(name: str, near: str) -> None:
    with pytest.raises(TitanPlanError) as caught:
        find_model(name)
    assert caught.value.code == "C601"
    assert repr(name) in caught.value.message
    assert near in caught.value.hint
    assert caught.value.hint.count(", ") <= 2
    assert "titan-plan models" in caught.value.hint


def test_an_unknown_size_names_those_of_the_family() -> None:
    with pytest.raises(TitanPlanError, match="size '8B'") as caught:
        find_model_by_size("Llama2", "8B")
    assert "7B, 13B, 34B, 70B" in caught.value.hint


@settings(deadline=None)
@given(st.text(max_size=300))
def test_no_name_crashes(name: str) -> None:
    for find in (find_model, find_cluster):
        with suppress(TitanPlanError):  # any other exception fails the test
            find(name)


@pytest.mark.parametrize("name", ["", " ", "-", "\0", "x" * 5000])
def test_names_that_are_none_are_unknown(name: str) -> None:
    with pytest.raises(TitanPlanError) as caught:
        find_model(name)
    assert caught.value.code == "C601"


def test_a_path_finds_a_model_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**dump_model(find_model("tiny")), "n_layers": 6}), encoding="utf-8")
    assert find_model(str(path)).n_layers == 6


def test_a_path_finds_a_config_json_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    text = """{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}"""
    (folder / "config.json").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert find_model("./tiny").hidden_dim == 64
    assert find_model(str(folder / "config.json")).hidden_dim == 64
    assert find_model("tiny").hidden_dim == 128, "the catalogue goes before a folder of that name"


@pytest.mark.parametrize("name", ["none.yaml", "./none", "/none/config.json", "~nobody-of-that-name/x.yaml"])
def test_a_path_that_is_not_there_is_called_so(name: str) -> None:
    with pytest.raises(TitanPlanError, match="no such file"):
        find_model(name)


def test_the_list_is_sorted_by_family_and_size() -> None:
    keys = [(entry.family, entry.spec.total_params) for entry in list_models()]
    assert all(first <= second for first, second in pairwise(keys))
    assert all(entry.source for entry in list_models() if not entry.name.startswith("tiny"))


@pytest.mark.parametrize("cluster", list_clusters(), ids=lambda cluster: cluster.name)
def test_every_cluster_is_found_by_any_spelling_of_its_name(cluster: ClusterSpec) -> None:
    assert find_cluster(cluster.name) == cluster
    assert find_cluster(cluster.name.upper().replace("-", "_")) == cluster


def test_an_unknown_cluster_names_the_nearest_and_the_command() -> None:
    with pytest.raises(TitanPlanError) as caught:
        find_cluster("atlas-800t-a9")
    assert caught.value.code == "C602"
    assert "atlas-800t-a2" in caught.value.hint
    assert "titan-plan clusters" in caught.value.hint


def test_a_path_finds_a_cluster_file(request: pytest.FixtureRequest) -> None:
    path = request.config.rootpath / "configs" / "clusters" / "atlas-800t-a2.yaml"
    assert find_cluster(str(path)) == find_cluster("atlas-800t-a2")


def test_a_lookup_loads_no_heavy_library_and_answers_quickly() -> None:
    code = (
        "import sys, time; from cost_models.catalog import find_model; start = time.perf_counter();"
        "find_model('70B'); elapsed = time.perf_counter() - start;"
        "heavy = {'torch', 'pandas', 'networkx', 'numpy', 'optuna', 'plotly'} & set(sys.modules);"
        "assert not heavy, heavy; assert elapsed < 0.2, elapsed"  # 15 ms on an idle machine; tests share theirs
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "theta", "epsilon"),
    [
        ("llama2-7b", 1e4, 1e-5),
        ("llama3.1-8b", 5e5, 1e-5),
        ("mistral-7b", 1e4, 1e-5),
        ("mixtral-8x7b", 1e6, 1e-5),
        ("qwen2.5-7b", 1e6, 1e-6),
        ("qwen2.5-14b", 1e6, 1e-5),
        ("qwen3-8b", 1e6, 1e-6),
        ("qwen3-30b-a3b", 1e6, 1e-6),
        ("deepseek-v3", 1e4, 1e-6),
        ("gpt2-1.5b", 1e4, 1e-5),
    ],
)
def test_rotary_base_and_epsilon_are_those_of_the_published_config(name: str, theta: float, epsilon: float) -> None:
    model = find_model(name)
    assert (model.rope_theta, model.norm_epsilon) == (theta, epsilon)
