"""A deep model's peak told from two shallow ones is the one that a run of all its layers finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.layout import Layout
from cost_models.model import ModelSpec
from cost_models.workload import Workload
from runtime.config_values import TrainConfig
from runtime.dry_run import dry_run
from runtime.dry_run.reduced import reduced_dry_run
from tests.runtime.dry_run.layouts import CLUSTER, MODELS, model_of

DENSE = model_of(n_layers=14)
DEEP = model_of(n_layers=28)
LAYOUTS = {
    "alone": (DENSE, Layout(accumulation=2)),
    "ZeRO-1 reduces once": (DENSE, Layout(tp=2, sp=True, dp=2, dp_shard=2, zero=1)),
    "ZeRO-2 reduces each time": (DENSE, Layout(dp=4, dp_shard=2, zero=2, accumulation=3, reduce_gradients="every")),
    "ZeRO-3 recomputes": (DENSE, Layout(dp=2, dp_shard=2, zero=3, accumulation=2, recompute="full")),
    "selective, offloaded": (DENSE, Layout(recompute="selective", activation_offload=True, accumulation=2)),
    "swapped": (DENSE, Layout(dp=2, dp_shard=2, zero=1, swap_optimizer=True)),
    "1F1B with an odd end": (model_of(n_layers=27), Layout(pp=2, schedule="1f1b", accumulation=8, short_last=1)),
    "interleaved": (DEEP, Layout(pp=2, vpp=2, schedule="interleaved", accumulation=4)),
    "zero-bubble": (DENSE, Layout(pp=2, schedule="zero-bubble", accumulation=4)),
    "a fold": (DEEP, Layout(pp=2, vpp=2, schedule="zb-v", accumulation=4)),
    "some layers recomputed": (model_of(n_layers=32), Layout(dp=2, recompute="full", recompute_layers=18)),
    "some recomputed, offloaded": (
        model_of(n_layers=56),
        Layout(
            pp=2,
            schedule="1f1b",
            dp=2,
            dp_shard=2,
            zero=3,
            accumulation=3,
            recompute="full",
            recompute_layers=12,
            activation_offload=True,
        ),
    ),
    "few kept, reduced each time": (
        model_of(n_layers=24),
        Layout(
            dp=4, dp_shard=4, zero=2, accumulation=2, recompute="full", recompute_layers=21, reduce_gradients="every"
        ),
    ),
    "experts": (replace(MODELS["moe"], n_layers=14), Layout(dp=2, dp_shard=2, zero=3, ep=2, accumulation=2)),
}


def config_of(model: ModelSpec, layout: Layout) -> TrainConfig:
    batch = layout.dp * layout.micro_batch * layout.accumulation
    workload = Workload(seq_len=64, global_batch=batch, precision="bf16")
    return TrainConfig(model=model, workload=workload, layout=layout, cluster=CLUSTER)


@pytest.mark.parametrize(("model", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_line_through_two_depths_meets_the_third(model: ModelSpec, layout: Layout) -> None:
    config = config_of(model, layout)
    for rank in sorted({0, layout.devices - 1}):
        told, whole = reduced_dry_run(config, rank), dry_run(config, rank)
        assert sum(told.layers) < model.n_layers
        assert told.peak_bytes == whole.peak_bytes
        assert told.memory_bytes == dict(whole.memory_bytes)


@pytest.mark.parametrize(
    ("n_layers", "layout"), [(3, Layout(accumulation=2)), (9, Layout(recompute="full", recompute_layers=4))]
)
def test_what_is_shallow_or_uneven_is_run_as_it_is(n_layers: int, layout: Layout) -> None:
    config = config_of(model_of(n_layers=n_layers), layout)
    told = reduced_dry_run(config)
    assert told.layers == (n_layers,)
    assert told.peak_bytes == dry_run(config).peak_bytes
