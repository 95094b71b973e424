"""Whatever valid layout hypothesis thinks of trains like one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cost_models.errors import TitanPlanError
from runtime.guard import check_layout
from tests.runtime.parity.cases import sections_of
from tests.runtime.parity.comparing import FULL, assert_same_curve
from tests.runtime.parity.models import MODELS
from tests.runtime.parity.training import BATCH, config_of, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tests.ranks import RankPool

STEPS = 2
DEGREE = st.sampled_from([1, 2, 4])


@st.composite
def keys(draw: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """A model and short keys of a config; what does not go together is drawn again."""
    model = draw(st.sampled_from(["tiny", "tiny-moe"]))
    found = {name: draw(DEGREE) for name in ("tp", "cp", "pp", "dp")}
    assume(found["tp"] * found["cp"] * found["pp"] * found["dp"] <= 8)
    share = BATCH // found["dp"]
    found["micro_batch"] = draw(st.sampled_from([m for m in (1, 2, 4, 8) if m <= share]))
    found["sp"] = found["tp"] > 1 and draw(st.booleans())
    if found["cp"] > 1:
        found["cp_kind"] = draw(st.sampled_from(["ulysses", "allgather", "ring"]))
    if found["pp"] > 1:
        found["schedule"] = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v"]))
        found["vpp"] = 2 if found["schedule"] in {"interleaved", "zb-v"} else 1
    found["zero"] = draw(st.integers(0, 3))
    found["shard"] = draw(st.sampled_from([found["dp"], 1])) if found["zero"] else 1
    found["reduce"] = draw(st.sampled_from(["last", "every"]))
    found["ep"] = draw(DEGREE) if model == "tiny-moe" else 1
    found["recompute"] = draw(st.sampled_from([False, "selective", "full", 1]))
    for name in ("swap", "offload", "fuse", "overlap"):
        found[name] = draw(st.booleans())
    found["placement"] = draw(st.sampled_from(["tp-cp-dp-pp", "tp-cp-pp-dp"]))
    return model, found


@pytest.mark.heavy
@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(keys())
def test_a_random_layout_trains_like_one_process(ranks: RankPool, drawn: tuple[str, dict[str, Any]]) -> None:
    model, found = drawn
    sections = sections_of(found)
    try:
        config = config_of(MODELS[model], sections)
        check_layout(config, kind="cpu")
    except TitanPlanError:
        assume(False)
    (wanted,) = ranks.run(1, train, MODELS[model], {}, STEPS)
    for curve in ranks.run(config.layout.devices, train, MODELS[model], sections, STEPS, True):
        assert_same_curve(curve, wanted, FULL)
