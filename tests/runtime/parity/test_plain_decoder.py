"""One process of the trainer is held against an implementation out of stock PyTorch operators."""

from __future__ import annotations

import pytest

from runtime.assembly import assemble
from runtime.device import open_device
from tests.runtime.parity.cases import case, sections_of
from tests.runtime.parity.comparing import Bound, assert_same_curve
from tests.runtime.parity.models import MODELS
from tests.runtime.parity.plain_decoder import train_plainly
from tests.runtime.parity.training import LR, batches, config_of, train_config

BOUND = Bound(loss=1e-5, norm=1e-5)
STEPS = 5


@pytest.mark.parametrize("model", ["tiny", "mha", "biases", "tied", "gpt2", "tiny-moe"])
def test_one_process_trains_like_a_plain_decoder(model: str) -> None:
    config = config_of(MODELS[model], sections_of({"micro_batch": 4}))
    weights = {t.name: t.weight for t in assemble(config, open_device("cpu", 0)).trainables}
    wanted = train_plainly(config.model, weights, batches(config, STEPS), LR)
    assert_same_curve(train_config(config, STEPS), wanted, BOUND)


def test_the_plain_decoder_would_notice_another_epsilon_or_decay() -> None:
    """The bound is tight enough to tell a wrong constant of the optimizer."""
    config = config_of(MODELS["tiny"], case().sections)
    weights = {t.name: t.weight for t in assemble(config, open_device("cpu", 0)).trainables}
    right, wrong = (train_plainly(config.model, weights, batches(config, STEPS), lr) for lr in (LR, LR * 1.01))
    with pytest.raises(pytest.fail.Exception):
        assert_same_curve(wrong, right, BOUND)
