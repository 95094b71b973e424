"""The dry run is true: what it says is alive is what is alive on real ranks with real tensors, and by a hand count."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch.distributed as dist

from runtime.assembly import StandIns, open_groups
from runtime.dry_run import DryRun, dry_run
from runtime.dry_run.ledger import Ledger
from runtime.dry_run.run import followed
from runtime.dry_run.stand_ins import CountedDevice, CountingKernel
from runtime.dry_run.torch_fake import is_plain, resizes_told
from runtime.dry_run.watch import Watch
from runtime.models.building import counted
from tests.runtime.parity.cases import sections_of
from tests.runtime.parity.models import MODELS
from tests.runtime.parity.training import config_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.ranks import RankPool

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("tiny", {}),
    ("tiny", {"precision": "bf16", "recompute": "full"}),
    ("tiny", {"dp": 2}),
    ("tiny", {"tp": 2, "precision": "bf16"}),
    ("tiny", {"tp": 2, "sp": False, "recompute": "selective"}),
    ("tiny", {"dp": 2, "zero": 1, "micro_batch": 1}),
    ("tiny", {"dp": 2, "zero": 3, "precision": "bf16", "swap": True}),
    ("tiny", {"tp": 2, "dp": 2, "zero": 2, "reduce": "every", "micro_batch": 1}),
    ("tiny", {"dp": 4, "zero": 2, "shard": 2}),
    ("tiny", {"cp": 2, "cp_kind": "ring"}),
    ("tiny", {"cp": 2, "cp_kind": "allgather", "zero": 3}),
    ("tiny", {"cp": 2, "cp_kind": "ulysses", "recompute": "full"}),
    ("tiny", {"pp": 2, "micro_batch": 2, "schedule": "1f1b", "offload": True}),
    ("tiny", {"pp": 2, "dp": 2, "micro_batch": 1, "schedule": "1f1b", "zero": 2, "precision": "bf16"}),
    ("tiny", {"pp": 2, "micro_batch": 2, "schedule": "gpipe"}),
    ("tiny", {"pp": 2, "micro_batch": 2, "schedule": "zero-bubble"}),
    ("tiny", {"pp": 2, "vpp": 2, "micro_batch": 2, "schedule": "interleaved", "recompute": "full"}),
    ("tiny", {"pp": 2, "vpp": 2, "micro_batch": 2, "schedule": "zb-v", "dp": 2, "zero": 3}),
    ("tied", {"pp": 2, "micro_batch": 2, "schedule": "1f1b"}),
    ("tiny-moe", {"tp": 2}),
]
# Rows go where random routers send them: the dry run balances them.
ROUTED = 0.1
_LETS_GO_S = 0.002


class GlooLedger(Ledger):
    """Leaves out gloo's own copy of what it reduces and scatters: it sums whole copies, then splits them."""

    def __init__(self) -> None:
        super().__init__(counts=is_plain)

    def see(self, tensors: Iterable[object], made_by: str) -> None:
        if made_by != "split":
            super().see(tensors, made_by)


@contextmanager
def gloo_lets_go() -> Iterator[None]:
    """Each wait ends once gloo's thread has dropped what it carried: it does so a moment after it says that it is done.

    A rank that goes on at once finds a gathered buffer alive or dead by chance.
    """
    waits = dist.Work.wait

    def wait(work: dist.Work, *args: Any) -> bool:  # noqa: ANN401 - passed on as it came
        done = waits(work, *args)
        time.sleep(_LETS_GO_S)
        return done

    with mock.patch.object(dist.Work, "wait", wait):
        yield


def real_run(model: dict[str, Any], sections: dict[str, dict[str, Any]]) -> DryRun:
    """What `dry_run` tells, of this real rank."""
    config = config_of(model, sections)
    ledger = GlooLedger()
    watch = Watch(ledger)
    groups = open_groups(config, "cpu")
    stand_ins = StandIns(groups=groups, kernel=CountingKernel(watch), row_counts=counted)
    rank = dist.get_rank() if groups is not None else 0
    with resizes_told(ledger.resized), watch, gloo_lets_go():
        device = CountedDevice(ledger)
        return followed(config, rank, device, stand_ins, ledger, watch, started=time.perf_counter(), settled=False)


def _case(model: str, keys: dict[str, Any]) -> Any:  # noqa: ANN401 - a set of parameters of pytest
    """Four ranks, and schedules over several stages, are heavy: what real ranks hold can hang on when they meet."""
    ranks = keys.get("dp", 1) * keys.get("pp", 1) * keys.get("tp", 1) * keys.get("cp", 1)
    marks = [pytest.mark.heavy] if ranks > 2 or "vpp" in keys or keys.get("schedule") == "zero-bubble" else []
    return pytest.param(model, keys, id="-".join([model, *(f"{k}{v}" for k, v in keys.items())]), marks=marks)


@pytest.mark.parametrize(("model", "keys"), [_case(*layout) for layout in LAYOUTS])
def test_the_peak_is_that_of_real_ranks(ranks: RankPool, model: str, keys: dict[str, Any]) -> None:
    sections = sections_of(keys)
    config = config_of(MODELS[model], sections)
    real = ranks.run(config.layout.devices, real_run, MODELS[model], sections)
    allowed = ROUTED if "moe" in model else 0.01
    for found in real:
        told = dry_run(config, found.rank)
        assert told.peak_bytes == pytest.approx(found.peak_bytes, rel=allowed)
        assert told.parameter_bytes == found.parameter_bytes
        assert told.gradient_bytes == found.gradient_bytes
        assert told.optimizer_bytes == found.optimizer_bytes
        assert told.host_bytes == pytest.approx(found.host_bytes, rel=allowed)
        if "moe" not in model:
            assert told.messages == found.messages
            assert told.flops == pytest.approx(found.flops)
