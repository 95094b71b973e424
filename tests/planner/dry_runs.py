"""Dry runs made up from predictions, for tests of what is said about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cost_models.rank_traffic import rank_messages
from planner.dry_compare import predict_rank
from runtime.dry_run.shortened import ToldRun
from runtime.dry_run.values import CATEGORIES, DryRun, LiveTensor, Message

if TYPE_CHECKING:
    from cost_models.layout import Layout
    from cost_models.setting import Setting


def a_run(layout: Layout, setting: Setting, rank: int, *, factor: float = 1.0) -> ToldRun:
    """A dry run that finds what was predicted, times a factor."""
    predicted = predict_rank(setting, layout, rank)
    memory = dict.fromkeys(CATEGORIES, 0)
    for name, n_bytes in predicted.memory_bytes.items():
        memory["temporaries" if name == "transient" else name] += round(n_bytes * factor)
    run = DryRun(
        rank=rank,
        peak_bytes=sum(memory.values()),
        memory_bytes=memory,
        moment="backward of micro batch 1, layers.0",
        largest=(
            LiveTensor(
                n_bytes=8, category="weights", shape=(2, 2), dtype="bfloat16", made_by="mm", module="head", moment="x"
            ),
        ),
        parameter_bytes=predicted.parameter_bytes,
        gradient_bytes=predicted.gradient_bytes,
        optimizer_bytes=predicted.optimizer_bytes,
        host_bytes=0,
        forward_flops=predicted.flops,
        backward_flops=0.0,
        messages=tuple(
            Message(group=m.group, kind=m.kind, count=m.count, n_bytes=m.n_bytes, ranks=m.ranks)
            for m in rank_messages(setting, layout, rank)
        ),
        timeline=(),
        seconds=1.5,
    )
    return ToldRun(run=run, micro_batches=(layout.accumulation,))
