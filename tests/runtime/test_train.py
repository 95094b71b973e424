"""The command of the trainer: what it reads, and what it refuses before a rank is met. Nothing here trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import runtime.trainer
from runtime import train
from runtime.config import load_config
from runtime.guard import check_layout
from runtime.train_options import FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.config import TrainConfig

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "configs" / "examples" / "llama70b-64npu-guide.yaml"
TINY = ("--model-name", "tiny", "--seq-len", "16")


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, TrainConfig | None]]:
    """Call the trainer as one of `world` ranks: its exit code, what it said, and what it would train."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TITAN_PLAN_TIMEOUT_S"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TITAN_PLAN_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object, world: int = 1, rank: int = 0, **environ: str) -> tuple[int, str, TrainConfig | None]:
        started: list[TrainConfig] = []
        monkeypatch.setattr(runtime.trainer, "train", lambda config, *_: started.append(config))
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world} if world > 1 else {}
        for name, value in (variables | environ).items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
        code = train.main()
        return code, capsys.readouterr().err, started[0] if started else None

    return call


def guide_text(batch_size: int) -> str:
    """config.yaml as the users' guide prints it, with its accumulation of 8."""
    text = GUIDE.read_text(encoding="utf-8")
    assert "gradient_accumulation_steps: 64" in text
    assert "batch_size: 256" in text
    text = text.replace("gradient_accumulation_steps: 64", "gradient_accumulation_steps: 8")
    return text.replace("batch_size: 256", f"batch_size: {batch_size}", 1)


def refused(found: tuple[int, str, TrainConfig | None], *words: str, code: int = 2) -> None:
    """The exit code, each of the words, one error and its hint in two lines, and nothing trained."""
    assert found[0] == code, found[1]
    assert found[2] is None
    assert found[1].startswith("error[")
    assert found[1].count("\n") == 2, found[1]
    for word in words:
        assert word in found[1]


def test_the_command_of_the_guide_is_read_as_it_says(command: Callable[..., tuple[int, str, TrainConfig]]) -> None:
    code, _, config = command(
        "--model-name", "llama2", "--model-size", "7B", "--dataset-name", "demo", "--batch-size", 2, "--lr", "1e-4",
        "--epochs", 3, "--output-dir", "./out", "--set", "training.dataset.tokenizer=bytes", world=8,
    )  # fmt: skip
    assert code == 0
    assert (config.model.name, config.layout.name, config.workload.global_batch) == (
        "llama2-7b", "tp1-pp1-dp8-mbs2-z2", 16,
    )  # fmt: skip
    training = config.training
    assert (training.lr, training.epochs, training.max_steps, training.output_dir) == (1e-4, 3, None, "./out")


def test_the_file_of_the_guide_is_refused_with_its_arithmetic(
    command: Callable[..., tuple[int, str, TrainConfig]], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(guide_text(256), encoding="utf-8")
    found = command("--config", "config.yaml", world=64)
    product = "error[B501]: config.yaml: micro_batch_size 1 x gradient_accumulation_steps 8 x dp_size 4 = 32"
    mend = "hint: gradient_accumulation_steps would have to be 64 (256 / (1 x 4) = 64)"
    refused(found, f"{product}, batch_size is 256", mend)


@pytest.mark.parametrize("changes", [("--batch-size", "32"), ("--set", "training.gradient_accumulation_steps=64")])
def test_the_file_of_the_guide_trains_on_64_devices_once_its_batch_adds_up(
    command: Callable[..., tuple[int, str, TrainConfig]], tmp_path: Path, changes: tuple[str, str]
) -> None:
    (tmp_path / "config.yaml").write_text(guide_text(256), encoding="utf-8")
    code, _, config = command("--config", "config.yaml", *changes, world=64)
    assert code == 0
    assert (config.world_size, config.layout.name) == (64, "tp4-pp4-dp4-mbs1-z2-full")


def test_the_shipped_file_of_the_guide_passes_on_64_npus_and_is_its_batch_over_64_steps() -> None:
    config = load_config(GUIDE, world_size=64)
    check_layout(config, kind="npu")
    assert (config.layout.accumulation, config.workload.global_batch) == (64, 256)


def test_flags_go_before_the_file_and_set_before_flags(
    command: Callable[..., tuple[int, str, TrainConfig]], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(
        "model: {name: tiny}\ntraining: {lr: '1e-2', seed: 1, max_steps: 5, batch_size: 4}\n", encoding="utf-8"
    )
    code, _, config = command(
        "--config", "config.yaml", "--lr", "1e-3", "--batch-size", "8", "--max-steps", "6", "--zero-stage", "2",
        "--gradient-checkpointing", "--set", "training.max_steps=7", world=2,
    )  # fmt: skip
    assert code == 0
    training = config.training
    assert (training.lr, training.seed, training.max_steps, config.workload.global_batch) == (1e-3, 1, 7, 8)
    assert config.layout.name == "tp1-pp1-dp2-mbs1-z2-full"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("error[C617]", "neither --config nor --model-name")),
        (("--config", "none.yaml"), ("error[C603]", "none.yaml")),
        (("--config", "."), ("error[C60",)),
        (("--model-name", "tinny"), ("error[C60", "tiny")),
        ((*TINY, "--batchsize", "2"), ("error[C617]", "--batch-size")),
        ((*TINY, "--lr", "fast"), ("error[C606]", "training.lr is 'fast'", "a number is needed")),
        ((*TINY, "--lr", "-1"), ("error[C610]", "training.lr")),
        ((*TINY, "--set", "training.lrr=1"), ("error[C605]", "training.lrr", "lr")),
        ((*TINY, "--set", "optimisation.zero_stage=1"), ("error[C605]", "did you mean optimization?")),
        ((*TINY, "--set", "training.lr"), ("error[C617]", "training.lr=1e-4")),
        ((*TINY, "--zero-stage", "4"), ("error[C610]", "optimization.zero_stage")),
        ((*TINY, "--precision", "bf61"), ("error[C611]", "bf16")),
        ((*TINY, "--batch-size", "8", "--micro-batch-size", "3"), ("error[C617]", "'8' does not split")),
        ((*TINY, "--dataset-name", "corpus.jsonl"), ("error[C6", "corpus.jsonl")),
        ((*TINY, "--tokenizer", "nowhere.json"), ("error[C6", "nowhere.json")),
        ((*TINY, "--set", "training.checkpoint.load=nowhere"), ("error[C6", "nowhere")),
        ((*TINY, "--set", "distributed.tp_size=3"), ("error[T310]", "tp_size 3")),
        ((*TINY, "--compile", "--set", "model.n_heads=7"), ("error[",)),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_two_lines(
    command: Callable[..., tuple[int, str, TrainConfig]], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(command(*arguments), *words)


def test_only_the_first_rank_of_a_node_tells_what_all_are_given(
    command: Callable[..., tuple[int, str, TrainConfig]],
) -> None:
    refused(command(*TINY, "--lr", "fast", world=2, rank=0), "error[C606]")
    assert command(*TINY, "--lr", "fast", world=2, rank=1) == (2, "", None)


@pytest.mark.parametrize(("world", "who"), [(1, "the run has 1"), (2, "the run has 2")])
def test_a_wrong_number_of_processes_is_told_with_the_command_that_starts_the_right_one(
    command: Callable[..., tuple[int, str, TrainConfig]], tmp_path: Path, world: int, who: str
) -> None:
    (tmp_path / "config.yaml").write_text("model: {name: tiny}\ndistributed: {tp_size: 2, dp_size: 2}\n")
    found = command("--config", "config.yaml", world=world)
    refused(found, "error[T310]", who, "its 4 devices", "torchrun --nproc_per_node=4 -m runtime.train")


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({"RANK": "abc"}, "RANK is 'abc'"),
        ({"RANK": "²"}, "RANK is '²'"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2'"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, WORLD_SIZE is 2"),
        ({"TITAN_PLAN_TIMEOUT_S": "soon"}, "TITAN_PLAN_TIMEOUT_S is 'soon'"),
        ({"TITAN_PLAN_TIMEOUT_S": "nan"}, "TITAN_PLAN_TIMEOUT_S is 'nan'"),
        ({"TITAN_PLAN_TIMEOUT_S": "1e300"}, "TITAN_PLAN_TIMEOUT_S is '1e300'"),
        ({"TITAN_PLAN_TIMEOUT_S": "0"}, "TITAN_PLAN_TIMEOUT_S is '0'"),
        ({"TITAN_PLAN_DEVICE": "tpu"}, "TITAN_PLAN_DEVICE is 'tpu'"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(
    command: Callable[..., tuple[int, str, TrainConfig]], environ: dict[str, str], word: str
) -> None:
    refused(command(*TINY, **environ), word)


def test_a_folder_that_cannot_be_made_is_told_before_a_rank_waits_for_another(
    command: Callable[..., tuple[int, str, TrainConfig]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    refused(command(*TINY, "--output-dir", "file/out", world=2), "error[R753]", "file/out", code=3)
    assert command(*TINY, "--output-dir", "file/out", world=2, rank=1) == (3, "", None)


def test_help_names_every_flag_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "-h"])
    assert train.main() == 0
    answer = capsys.readouterr().out
    for flag in FLAGS:
        assert answer.count(f"  {flag.name} ") == 1


def test_no_file_is_needed_to_name_a_whole_layout(command: Callable[..., tuple[int, str, TrainConfig]]) -> None:
    code, said, config = command(*TINY, "--set", "distributed.tp_size=2", "--batch-size", "4", world=2)
    assert code == 0, said
    assert (config.layout.name, config.workload.global_batch) == ("tp2-pp1-dp1-mbs4-z0", 4)
    _, _, config = command(*TINY, "--set", "distributed.tp_size=2", "--batch-size", "4", world=4)
    assert (config.layout.name, config.workload.global_batch) == ("tp2-pp1-dp2-mbs4-z2", 8)
