"""Options of the command line as keys of config.yaml."""

from __future__ import annotations

import click
import pytest

from runtime.train_options import FLAGS, overrides_of, training_options

VALUES = {
    "--batch-size": "8",
    "--micro-batch-size": "2",
    "--seq-len": "32",
    "--lr": "1e-4",
    "--precision": "fp16",
    "--loss-scale": "128",
}


def given_by(*arguments: str) -> dict[str, object]:
    """What click makes of a command line."""
    found: dict[str, object] = {}

    @click.command()
    @training_options
    def command(**given: object) -> None:
        found.update(given)

    command.main(list(arguments), standalone_mode=False)
    return found


def overrides(
    *arguments: str, sets: tuple[str, ...] = (), has_file: bool = False, devices: int = 1
) -> dict[str, object]:
    return overrides_of(given_by(*arguments), sets, has_file=has_file, devices=devices)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_each_flag_stands_for_its_key(flag: object) -> None:
    name, key = flag.name, flag.key  # type: ignore[attr-defined]
    value = VALUES.get(name, "1")
    assert overrides(name, value, has_file=True) == {key: value}


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.bare], ids=lambda flag: flag.name)
def test_a_switch_needs_no_value_and_takes_none_of_the_next_flag(flag: object) -> None:
    name, key = flag.name, flag.key  # type: ignore[attr-defined]
    assert overrides(name, "--seed", "3", has_file=True) == {key: "true", "training.seed": "3"}


def test_a_switch_may_be_turned_off() -> None:
    assert overrides("--fuse-gradient", "false", has_file=True) == {"distributed.fuse_gradient": "false"}


def test_batch_size_is_global_with_a_file_and_of_each_device_without() -> None:
    assert overrides("--batch-size", "8", has_file=True) == {"training.batch_size": "8"}
    assert overrides("--batch-size", "8") == {"training.micro_batch_size": "8"}


def test_a_batch_of_a_device_is_taken_in_micro_batches() -> None:
    found = overrides("--batch-size", "8", "--micro-batch-size", "2")
    assert found == {"training.micro_batch_size": "2", "training.gradient_accumulation_steps": 4}


@pytest.mark.parametrize("micro", ["3", "16", "0", "two"])
def test_a_batch_of_a_device_that_does_not_split_is_refused(micro: str) -> None:
    with pytest.raises(click.BadParameter, match="'8' does not split into --micro-batch-size"):
        overrides("--batch-size", "8", "--micro-batch-size", micro)


def test_without_a_file_several_devices_shard_their_state_unless_told_otherwise() -> None:
    assert overrides(devices=2) == {"optimization.zero_stage": "2"}
    assert overrides("--zero-stage", "0", devices=2) == {"optimization.zero_stage": "0"}
    assert overrides(devices=1) == overrides(devices=2, has_file=True) == {}


def test_set_goes_before_flags_and_keeps_further_equals_signs() -> None:
    found = overrides("--lr", "1", sets=("training.lr=2", " training.output_dir =a=b"), has_file=True)
    assert found == {"training.lr": "2", "training.output_dir": "a=b"}


def test_a_set_without_a_value_says_how_it_is_written() -> None:
    with pytest.raises(click.BadParameter, match=r"training\.lr=1e-4"):
        overrides(sets=("training.lr",))
