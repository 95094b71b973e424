"""The trainer's guard refuses by the planner's rules, with or without the cluster at hand."""

from __future__ import annotations

import pytest

from cost_models.errors import TitanPlanError
from runtime.config import TrainConfig, parse_config
from runtime.guard import check_layout


def config(cluster: str = "", **distributed: object) -> TrainConfig:
    values = {"model": {"name": "tiny"}, "distributed": distributed, "cluster": cluster or None}
    return parse_config(values, "config.yaml")


def code_of(given: TrainConfig, kind: str = "") -> str:
    with pytest.raises(TitanPlanError) as caught:
        check_layout(given, kind=kind)
    assert caught.value.exit_code == 2
    assert caught.value.message.startswith("config.yaml: ")
    return caught.value.code


def test_a_valid_layout_passes() -> None:
    check_layout(config(tp_size=2, cp_size=2, dp_size=2), kind="cpu")


@pytest.mark.parametrize(
    ("code", "distributed"),
    [
        ("D203", {"tp_size": 8}),
        ("D201", {"pp_size": 3}),
        ("D205", {"tp_size": 2, "ep_size": 2}),
        ("S407", {"virtual_pp_size": 2}),
    ],
)
def test_a_broken_rule_is_told_by_its_code(code: str, distributed: dict[str, object]) -> None:
    assert code_of(config(**distributed)) == code


def test_the_kind_at_hand_decides_not_the_cluster_that_was_planned_for() -> None:
    check_layout(config("atlas-800t-a2", cp_size=2, cp_kind="ring"), kind="cpu")


def test_a_cluster_that_only_the_planners_machine_knows_is_no_obstacle() -> None:
    check_layout(config("our-own-cluster", tp_size=2))
