"""Parameters, gradients and optimizer state of a rank are predicted to the byte, also where shards are padded."""

from __future__ import annotations

import pytest

from cost_models.layout import Layout
from cost_models.model import ModelSpec
from cost_models.rank_elements import gradient_elements, updated_elements
from cost_models.workload import Workload
from runtime.config_values import TrainConfig
from runtime.dry_run import dry_run
from tests.runtime.dry_run.layouts import CLUSTER, MODELS

UNEVEN = (
    Layout(dp=3, zero=0),
    Layout(dp=5, dp_shard=5, zero=3),
    Layout(dp=3, dp_shard=3, zero=2, pp=2, schedule="1f1b", accumulation=2),
    Layout(dp=3, dp_shard=3, zero=1, tp=2, sp=True),
)


@pytest.mark.parametrize("layout", UNEVEN, ids=lambda layout: layout.name)
@pytest.mark.parametrize("model", [MODELS["moe"], MODELS["shared"], MODELS["latent"]], ids=["moe", "shared", "latent"])
def test_a_rank_has_as_many_elements_as_its_trainer(model: ModelSpec, layout: Layout) -> None:
    batch = layout.dp * layout.micro_batch * layout.accumulation
    workload = Workload(seq_len=16, global_batch=batch, precision="bf16")
    config = TrainConfig(model=model, workload=workload, layout=layout, cluster=CLUSTER)
    for rank in (0, layout.devices - 1):
        found, updated = dry_run(config, rank), updated_elements(model, layout, rank)
        assert found.parameter_bytes == 4 * updated
        assert found.optimizer_bytes == 8 * updated
        assert found.gradient_bytes == 4 * gradient_elements(model, layout, rank)
