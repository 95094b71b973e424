"""How parameters are cut, by their names."""

from __future__ import annotations

import pytest

from cost_models.layout import Layout
from runtime.assembly import assemble
from runtime.device import open_device
from runtime.models.roles import role_of
from tests.runtime.parity.models import MODELS
from tests.runtime.parity.training import config_of

TP, ALONE = Layout(tp=2, sp=True), Layout()
EXPERTS = Layout(tp=2, sp=True, dp=2, ep=2)


def role(name: str, model: str = "tiny", layout: Layout = TP) -> tuple[int | None, bool]:
    found = role_of(name, config_of(MODELS[model], {}).model, layout)
    return found.cut, found.partial


@pytest.mark.parametrize(
    ("name", "model", "wanted"),
    [
        ("embedding.weight", "tiny", (0, False)),
        ("head.weight", "tiny", (0, False)),
        ("head.norm.weight", "tiny", (None, True)),
        ("embedding.positions", "gpt2", (None, True)),
        ("embedding.norm.bias", "bloom", (None, True)),
        ("layers.3.attention_norm.weight", "tiny", (None, True)),
        ("layers.3.attention.q.weight", "tiny", (0, False)),
        ("layers.3.attention.k.bias", "biases", (0, False)),
        ("layers.3.attention.out.weight", "tiny", (1, False)),
        ("layers.3.attention.out.bias", "biases", (None, True)),
        ("layers.3.attention.q_norm.weight", "qk-norm", (None, True)),
        ("layers.3.mlp.gate.weight", "tiny", (0, False)),
        ("layers.3.mlp.up.bias", "biases", (0, False)),
        ("layers.3.mlp.down.weight", "tiny", (1, False)),
        ("layers.3.mlp.down.bias", "biases", (None, True)),
        ("layers.3.attention.q_down.weight", "mla-q", (None, True)),
        ("layers.3.attention.q_up.weight", "mla-q", (0, False)),
        ("layers.3.attention.kv_up.weight", "mla-q", (0, False)),
        ("layers.3.attention.kv_norm.weight", "mla-q", (None, True)),
        ("layers.3.mlp.router.weight", "tiny-moe", (None, True)),
        ("layers.3.mlp.shared_gate", "moe-gate", (None, True)),
        ("layers.3.mlp.shared.up.weight", "moe-gate", (0, False)),
        ("layers.3.mlp.experts.gate", "tiny-moe", (1, False)),
        ("layers.3.mlp.experts.down", "tiny-moe", (2, False)),
    ],
)
def test_a_parameter_is_cut_where_its_operator_cuts_it(name: str, model: str, wanted: tuple[int | None, bool]) -> None:
    assert role(name, model) == wanted
    assert role(name, model, ALONE) == (None, False)


def test_experts_are_dealt_out_whole_over_ep() -> None:
    assert role("layers.0.mlp.experts.down", "tiny-moe", EXPERTS) == (0, False)
    assert role("layers.0.mlp.experts.up", "tiny-moe", EXPERTS) == (0, False)


def test_without_sp_only_norms_of_heads_have_gradients_in_parts() -> None:
    layout = Layout(tp=2)
    assert role("layers.0.attention.q_norm.weight", "qk-norm", layout) == (None, True)
    assert role("layers.0.attention.q_norm.weight", "mla-q", layout) == (None, False)
    assert role("layers.0.attention_norm.weight", "qk-norm", layout) == (None, False)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_matrices_are_decayed_and_vectors_are_not(model: str) -> None:
    for trainable in assemble(config_of(MODELS[model], {}), open_device("cpu", 0)).trainables:
        assert trainable.role.decayed == (trainable.weight.ndim > 1), trainable.name


@pytest.mark.parametrize("model", sorted(MODELS))
def test_the_trainer_has_the_planners_parameters(model: str) -> None:
    """Router biases are moved by their own rule: the planner counts them, the optimizer does not see them."""
    config = config_of(MODELS[model], {})
    found = sum(t.weight.numel() for t in assemble(config, open_device("cpu", 0)).trainables)
    moe = config.model.moe
    biases = moe.experts * config.model.moe_layers if moe and moe.router_bias else 0
    assert found + biases == config.model.total_params
