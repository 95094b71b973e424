"""A trained model as Hugging Face weights: what was read comes out again, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from cost_models.errors import TitanPlanError
from cost_models.hf_config import load_hf_config
from runtime import hf_writing
from runtime.checkpoint import Checkpoints
from runtime.config import load_config
from runtime.config_writing import write_config
from runtime.hf_export import main
from runtime.hf_folder import check_hf
from runtime.hf_writing import HfPiece, export_hf, parts_of
from tests.runtime.hf.folders import CONFIGS, weights_of, write_folder
from tests.runtime.hf.runs import Sections, config_of, loss_of, opened

if TYPE_CHECKING:
    from tests.ranks import RankPool


def save(source: str, sections: Sections) -> None:
    """Start a run from a folder and write a checkpoint, config.yaml beside it."""
    folder = Path(source)
    out = str(folder.parent / "run")
    sections["training"] = sections.get("training", {}) | {"output_dir": out}
    config = config_of(folder, sections)
    engine, assembly, device = opened(config, folder)
    checkpoints = Checkpoints(Path(out) / "checkpoints", config.training.checkpoint, config, engine, assembly, device)
    checkpoints.save(3, 12, wait=True)
    checkpoints.finish()
    (Path(out) / "config.yaml").write_text(write_config(config))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of the small llama."""
    save(str(write_folder(tmp_path / "llama", "llama")), {})
    return tmp_path / "run"


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def export(run: Path, *options: str) -> int:
    return main(["--config", str(run / "config.yaml"), "-o", str(run / "out"), *options])


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_come_out_as_they_went_in(tmp_path: Path, name: str) -> None:
    save(str(write_folder(tmp_path / "hub", name)), {})
    run = tmp_path / "run"
    assert export(run, "--dtype", "fp32") == 0
    wanted, found = weights_of(CONFIGS[name]), tensors_of(run / "out")
    assert set(found) == set(wanted)
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)
    here = load_hf_config(tmp_path / "hub")
    assert check_hf(run / "out", here).family.architecture == CONFIGS[name]["architectures"][0]
    assert loss_of(str(run / "out"), name) == loss_of(str(tmp_path / "hub"), name)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_the_export_and_computes_the_same(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    from tests.runtime.hf.golden import GOLDEN, transformers_loss

    save(str(write_folder(tmp_path / "hub", name)), {})
    assert export(tmp_path / "run", "--dtype", "fp32") == 0
    found = transformers_loss(tmp_path / "run" / "out", name)
    assert found == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-6)


def test_a_run_of_several_ranks_is_exported_by_one_process(tmp_path: Path, ranks: RankPool) -> None:
    sections: Sections = {"distributed": {"tp_size": 2, "dp_size": 1}}
    ranks.run(2, save, str(write_folder(tmp_path / "hub", "llama")), sections)
    assert export(tmp_path / "run", "--dtype", "fp32") == 0
    wanted, found = weights_of(CONFIGS["llama"]), tensors_of(tmp_path / "run" / "out")
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)


def test_bf16_is_the_default_and_rounds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(run) == 0
    wanted = torch.from_numpy(weights_of(CONFIGS["llama"])["lm_head.weight"]).bfloat16()
    with safe_open(run / "out" / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("lm_head.weight"), wanted)
    assert json.loads((run / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    streams = capsys.readouterr()
    assert (streams.out, "LlamaForCausalLM, 0.000" in streams.err) == ("", True)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_parts_are_bounded_and_indexed(tmp_path: Path, name: str) -> None:
    save(str(write_folder(tmp_path / "hub", name)), {})
    run = tmp_path / "run"
    config = load_config(run / "config.yaml")
    written = export_hf(run / "checkpoints/step-00000003", config, run / "out", "fp32", part_bytes=50_000)
    assert len(written.files) > 3
    index = json.loads((run / "out/model.safetensors.index.json").read_text())
    assert (
        index["metadata"]["total_size"]
        == written.total_bytes
        == sum(w.nbytes for w in weights_of(CONFIGS[name]).values())
    )
    for file in written.files:
        held = load_file(run / "out" / file)
        assert sum(value.nbytes for value in held.values()) <= 50_000
        assert {key for key, place in index["weight_map"].items() if place == file} == set(held)
    assert loss_of(str(run / "out"), name) == loss_of(str(tmp_path / "hub"), name)


def test_a_tensor_above_the_bound_gets_a_file_of_its_own() -> None:
    pieces = [HfPiece(name, name, None, n) for name, n in (("a", 3), ("b", 9), ("c", 2), ("d", 2), ("e", 1))]
    assert [[p.name for p in part] for part in parts_of(iter(pieces), 2, 8)] == [["a"], ["b"], ["c", "d"], ["e"]]


def test_the_newest_whole_step_is_taken(run: Path) -> None:
    (run / "checkpoints/step-00000009").mkdir()
    assert export(run) == 0


def refused(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert export(run, *options) == 2
    return capsys.readouterr().err


def test_nothing_is_overwritten(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "out").mkdir()
    (run / "out/mine.txt").write_text("mine")
    assert "error[C664]" in refused(run, capsys)
    assert [path.name for path in (run / "out").iterdir()] == ["mine.txt"]


def test_bad_input_is_told_in_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "error[C663]" in refused(run, capsys, "--checkpoint", str(run / "nowhere"))
    assert "error[C617]" in refused(run, capsys, "--dtype", "fp16")
    other = (run / "config.yaml").read_text().replace("n_layers: 2", "n_layers: 3")
    (run / "config.yaml").write_text(other)
    told = refused(run, capsys)
    assert "error[C663]" in told
    assert "n_layers 2 in the checkpoint, 3 here" in told
    (run / "config.yaml").unlink()
    assert "error[C603]" in refused(run, capsys)
    assert not (run / "out").exists()


def test_a_torn_checkpoint_leaves_no_trace(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (run / "checkpoints/step-00000003").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    told = refused(run, capsys, "--checkpoint", str(run / "checkpoints/step-00000003"))
    assert "error[C663]" in told
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml"]


def test_a_full_disk_is_told_and_leaves_no_trace(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_writing, "_write_json", full)
    assert "No space left on device" in refused(run, capsys)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml"]


def test_a_model_that_transformers_does_not_have_is_refused_first(tmp_path: Path) -> None:
    config = config_of(write_folder(tmp_path, "llama"), None, norm="layernorm")
    with pytest.raises(TitanPlanError, match="RMSNorm") as caught:
        export_hf(tmp_path / "nowhere", config, tmp_path / "out")
    assert caught.value.code == "C660"
