"""Each rule has a layout that breaks it: the guard refuses by its code, and the trainer without guard shows why.

Rules are of two kinds. Limits: without the guard the trainer fails, or trains another model. Conventions: the trainer
could run it, and the rule says what the field's words mean, or spares waste.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster
from cost_models.errors import TitanPlanError
from cost_models.layout import Layout, Layouts
from cost_models.rules import RULES
from cost_models.setting import Setting
from cost_models.stack import TITAN
from runtime.config import TrainConfig, parse_config
from runtime.guard import check_layout
from tests.ranks import RankError
from tests.runtime.parity.comparing import FULL, deviation
from tests.runtime.parity.models import MODELS
from tests.runtime.parity.training import BATCH, SEQ_LEN, config_of, train_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.ranks import RankPool

FAILS, DIFFERS, RUNS = "fails", "differs", "runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A layout that breaks a rule.

    Attributes:
        outcome: what the trainer makes of it without the guard.
        beside: rules that cannot hold where this one is broken.
    """

    code: str
    layout: Layout
    outcome: str
    model: Mapping[str, Any]
    workload: Mapping[str, Any] = field(default_factory=dict)
    beside: frozenset[str] = frozenset()

    @property
    def config(self) -> TrainConfig:
        return replace(config_of(self.model, {"training": dict(self.workload)}), layout=self.layout)


def broken(
    code: str,
    outcome: str,
    model: str | Mapping[str, Any] = "tiny",
    *,
    beside: tuple[str, ...] = (),
    seq_len: int = SEQ_LEN,
    batch: int = BATCH,
    **keys: Any,  # noqa: ANN401
) -> Broken:
    """A case by what the layout differs in from one process; the batch is made exact unless it is given."""
    keys = {"accumulation": max(batch // keys.get("dp", 1) // keys.get("micro_batch", 1), 1), **keys}
    return Broken(
        code=code,
        layout=Layout(**keys),
        outcome=outcome,
        model=MODELS[model] if isinstance(model, str) else model,
        workload={"seq_len": seq_len, "batch_size": batch, "micro_batch_size": 1},
        beside=frozenset(beside),
    )


def tiny(**changes: object) -> dict[str, object]:
    return {"name": "tiny", **changes}


SIX_EXPERTS: Final = {"name": "tiny-moe", "moe": {"experts": 6, "top_k": 2, "ffn_dim": 64}}
P1 = {"pp": 2, "schedule": "1f1b"}
BROKEN = (
    broken("D202", FAILS, tp=3, sp=True, seq_len=66, beside=("D203", "D204")),
    broken("D203", FAILS, "mqa", tp=2),
    broken("D204", DIFFERS, tiny(ffn_dim=255), tp=2),
    broken("D204", DIFFERS, {"name": "tiny-moe", "moe": {"experts": 4, "top_k": 2, "ffn_dim": 63}}, tp=2, sp=True),
    broken("D209", RUNS, tiny(vocab_size=11), tp=2),
    broken("R703", RUNS, sp=True),
    broken("D207", DIFFERS, cp=2, cp_kind="ulysses", seq_len=63),
    broken("D207", DIFFERS, cp=2, cp_kind="allgather", seq_len=66),
    broken("D208", FAILS, tp=2, sp=True, seq_len=63),
    broken("D208", FAILS, "gpt2", tp=2, sp=True, seq_len=63, micro_batch=2),
    # Rows of two sequences split where those of one do not, and `tiny` never asks a sharded row where it stands.
    broken("D208", RUNS, tp=2, sp=True, seq_len=63, micro_batch=2),
    broken("D210", FAILS, tp=1, cp=3, cp_kind="ulysses", seq_len=66),
    broken("R701", DIFFERS, cp=2),
    broken("R701", RUNS, cp_kind="ring"),
    broken("R705", FAILS, MODELS["gpt2"] | {"positions": 32}),
    broken("D205", RUNS, dp=2, ep=2),
    broken("D205", FAILS, "tiny-moe", dp=3, ep=3, batch=9),
    broken("R704", DIFFERS, "tiny-moe", tp=2, ep=2),
    broken("D201", DIFFERS, pp=3, schedule="1f1b"),
    broken("S408", RUNS, **P1, short_first=4),
    broken("S402", RUNS, short_first=1),
    broken("B501", DIFFERS, dp=2, accumulation=2),
    broken("S407", FAILS, pp=2, beside=("S401",)),
    broken("S407", RUNS, schedule="1f1b", beside=("S401",)),
    broken("S407", FAILS, pp=2, vpp=2, schedule="gpipe", beside=("S401",)),
    broken("S401", FAILS, **P1, micro_batch=8),
    broken("S401", FAILS, "deep", pp=2, vpp=2, schedule="interleaved", batch=7),
    broken("S401", FAILS, pp=2, schedule="zero-bubble", batch=7),
    broken("D206", FAILS, SIX_EXPERTS, tp=2, sp=True, ep=6, dp=2),
    broken("D211", FAILS, dp=2, dp_shard=3, zero=1),
    broken("D211", RUNS, dp=2, dp_shard=2),
    broken("D212", RUNS, **P1, zero=2),
    broken("B502", RUNS, dp=2, dp_shard=2, zero=1, reduce_gradients="every"),
    broken("B502", RUNS, dp=2, dp_shard=2, zero=2, micro_batch=4, reduce_gradients="every"),
    broken("S403", RUNS, recompute="full", recompute_layers=4),
    broken("S403", RUNS, recompute_layers=1),
)
IDS = [f"{b.code}-{place}-{b.layout.name}" for place, b in enumerate(BROKEN)]
every_case = pytest.mark.parametrize("given", BROKEN, ids=IDS)


def kept(config: TrainConfig) -> dict[str, bool]:
    """Which rules a layout keeps."""
    setting = Setting(
        model=config.model,
        workload=config.workload,
        cluster=find_cluster("local"),
        stack=TITAN,
        calibration=calibration_of("local-cpu"),
        n_devices=config.world_size,
    )
    layouts = Layouts.of([config.layout])
    return {rule.code: bool(np.all(rule.holds(setting, layouts))) for rule in RULES}


def test_every_rule_has_a_layout_that_breaks_it() -> None:
    """T310 is told where the number of devices is known: a layout on its own has as many as it takes."""
    assert {b.code for b in BROKEN} | {"T310"} == {rule.code for rule in RULES}


@every_case
def test_the_layout_breaks_this_rule_alone(given: Broken) -> None:
    assert {code for code, holds in kept(given.config).items() if not holds} == {given.code} | given.beside


@every_case
def test_the_guard_refuses_by_the_rules_code(given: Broken) -> None:
    with pytest.raises(TitanPlanError) as caught:
        check_layout(given.config, kind="cpu")
    assert caught.value.code in {given.code} | given.beside


def test_degrees_that_do_not_multiply_to_the_devices_are_refused() -> None:
    values = {"model": {"name": "tiny"}, "distributed": {"tp_size": 2, "dp_size": 2}}
    with pytest.raises(TitanPlanError) as caught:
        parse_config(values, "case", world_size=8)
    assert caught.value.code == "T310"


@every_case
def test_the_trainer_without_guard_shows_why(given: Broken, ranks: RankPool) -> None:
    outcome = FAILS
    patience_s = 15 if given.outcome == FAILS else 90  # what fails may hang, what runs may be slow
    try:
        (curve, *_) = ranks.run(
            given.layout.devices, train_layout, given.model, given.workload, given.layout, 2, timeout_s=patience_s
        )
    except RankError as failure:
        told = str(failure)
    else:
        (wanted,) = ranks.run(
            1, train_layout, given.model, given.workload, Layout(accumulation=given.config.workload.global_batch), 2
        )
        found = deviation(curve, wanted)
        outcome, told = RUNS if found.loss <= FULL.loss and found.norm <= FULL.norm else DIFFERS, str(found)
    assert outcome == given.outcome, told
