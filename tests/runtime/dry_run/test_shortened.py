"""A shortened step tells what the whole one does."""

from __future__ import annotations

from typing import Any

import pytest

from cost_models.layout import Layout
from runtime.config import parse_config
from runtime.dry_run import dry_run
from runtime.dry_run.shortened import short_counts, shortened_dry_run


def config_of(
    distributed: dict[str, Any], optimization: dict[str, Any], micro_batches: int, model: str = "tiny"
) -> Any:  # noqa: ANN401
    batch = micro_batches * distributed.get("dp_size", 1)
    sections = {
        "model": {"name": model},
        "training": {"seq_len": 64, "batch_size": batch, "micro_batch_size": 1},
        "distributed": distributed,
        "optimization": {"precision": "bf16", **optimization},
    }
    return parse_config(sections, "test")


CASES = [
    ({}, {}, 8),
    ({"dp_size": 2, "reduce_gradients": "every"}, {"zero_stage": 2, "swap_optimizer": True}, 8),
    ({"dp_size": 2}, {"zero_stage": 3, "gradient_checkpointing": "full"}, 8),
    ({"pp_size": 2, "dp_size": 2}, {"zero_stage": 1, "gradient_checkpointing": "selective"}, 10),
    ({"pp_size": 2, "virtual_pp_size": 2}, {}, 12),
    ({"pp_size": 2, "pp_schedule": "zero-bubble"}, {}, 12),
    ({"pp_size": 2, "virtual_pp_size": 2, "pp_schedule": "zb-v"}, {}, 14),
]


@pytest.mark.parametrize(("distributed", "optimization", "micro_batches"), CASES)
def test_a_shortened_step_tells_what_the_whole_one_does(
    distributed: dict[str, Any], optimization: dict[str, Any], micro_batches: int
) -> None:
    config = config_of(distributed, optimization, micro_batches)
    rank = config.world_size - 1
    told, whole = shortened_dry_run(config, rank), dry_run(config, rank)
    assert sum(told.micro_batches) < micro_batches
    assert told.run.flops == pytest.approx(whole.flops, rel=1e-12)
    assert told.run.messages == whole.messages
    assert told.run.memory_bytes == whole.memory_bytes
    assert told.run.peak_bytes == whole.peak_bytes
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "host_bytes"):
        assert getattr(told.run, name) == getattr(whole, name)


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (Layout(accumulation=7), None),
        (Layout(accumulation=8), (3, 4)),
        (Layout(pp=4, schedule="1f1b", accumulation=13), None),
        (Layout(pp=4, schedule="1f1b", accumulation=64), (6, 7)),
        (Layout(pp=4, schedule="gpipe", accumulation=64), None),
        (Layout(pp=4, vpp=2, schedule="interleaved", accumulation=20), None),
        (Layout(pp=4, vpp=2, schedule="zb-v", accumulation=64), (12, 13)),
        (Layout(pp=4, vpp=2, schedule="interleaved", accumulation=64), (8, 12)),
    ],
    ids=str,
)
def test_a_step_is_shortened_where_two_short_ones_are_less(layout: Layout, counts: tuple[int, int] | None) -> None:
    assert short_counts(layout) == counts


def test_a_step_that_is_no_line_is_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    config, asked = config_of({}, {}, 8), []

    def grows(config: Any, rank: int) -> Any:  # noqa: ANN401
        asked.append(config.layout.accumulation)
        return replace(dry_run(config, rank), host_bytes=config.layout.accumulation)

    monkeypatch.setattr("runtime.dry_run.shortened.dry_run", grows)
    told = shortened_dry_run(config)
    assert asked == [3, 4, 8]
    assert told.micro_batches == (8,)
    assert told.run.host_bytes == 8
