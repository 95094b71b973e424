"""The vector forms of the rules, and the arithmetic each shows for one layout that breaks it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cost_models.layout import CP_KINDS, RECOMPUTES, REDUCTIONS, Column, Layout, Layouts
from cost_models.operators import ALLGATHER, RING, ULYSSES, padded_vocab
from cost_models.schedules import SCHEDULE_CONDITIONS, schedule_valid

if TYPE_CHECKING:
    from cost_models.model import ModelSpec
    from cost_models.setting import Setting

_NO_KIND = CP_KINDS.index("none")
_EVERY = REDUCTIONS.index("every")
_FULL = RECOMPUTES.index("full")
# Padding of the vocabulary up to this share is usual (GPT-3's 50,257 rows are padded to 51,200: 1.9 %).
_MOST_PADDING = 0.05
_TRAINED_IN = frozenset({"bf16", "fp16", "fp32"})


def _divides(part: Column, whole: Column | int) -> Column:
    return np.asarray(whole) % np.maximum(part, 1) == 0


def heads(s: Setting, x: Layouts) -> Column:
    return _divides(x.tp, s.model.n_heads)


def kv_heads(s: Setting, x: Layouts) -> Column:
    return _divides(x.tp, s.model.attention_kv_heads)


def _ffn_widths(model: ModelSpec) -> tuple[int, ...]:
    """Widths that tp cuts whatever ep is."""
    dense = (model.ffn_dim,) if model.dense_layers else ()
    shared = (model.moe.shared_ffn_dim,) if model.moe and model.moe.shared_ffn_dim else ()
    return dense + shared


def ffn(s: Setting, x: Layouts) -> Column:
    fine = np.ones_like(x.tp, dtype=bool)
    for width in _ffn_widths(s.model):
        fine = fine & _divides(x.tp, width)
    if s.model.moe:
        fine = fine & ((x.ep > 1) | _divides(x.tp, s.model.moe.ffn_dim))
    return fine


def vocabulary(s: Setting, x: Layouts) -> Column:
    padded = padded_vocab(s.model.vocab_size, x.tp.astype(float))
    return padded <= s.model.vocab_size * (1 + _MOST_PADDING)


def layers(s: Setting, x: Layouts) -> Column:
    stages, slots = x.pp * x.vpp, s.model.n_layers + x.short_first + x.short_last
    each = slots // stages
    return (slots % stages == 0) & (each >= x.short_first) & (each >= x.short_last)


def layers_reason(s: Setting, x: Layout) -> str:
    stages = x.pp * x.vpp
    if not x.short_first and not x.short_last:
        return f"{s.model.n_layers} layers do not split over pp {x.pp} x vpp {x.vpp} = {stages} stages"
    slots = s.model.n_layers + x.short_first + x.short_last
    return (
        f"{s.model.n_layers} layers, first stage {x.short_first} and last stage {x.short_last} short, need {slots} "
        f"places, which do not split over pp {x.pp} x vpp {x.vpp} = {stages} stages of at least as many"
    )


def no_empty_stage(s: Setting, x: Layouts) -> Column:
    stages, slots = x.pp * x.vpp, s.model.n_layers + x.short_first + x.short_last
    each = slots // stages
    return (slots % stages != 0) | ((each > x.short_first) & (each > x.short_last))


def no_empty_stage_reason(s: Setting, x: Layout) -> str:
    layers = x.stage_layers(s.model.n_layers)
    return f"stages of {layers[0]} to {max(layers)} to {layers[-1]} layers: first or last would hold none"


def experts(s: Setting, x: Layouts) -> Column:
    if not s.model.moe:
        return x.ep == 1
    return _divides(x.ep, s.model.moe.experts)


def experts_reason(s: Setting, x: Layout) -> str:
    if not s.model.moe:
        return f"{s.model.name} has no experts to split over ep {x.ep}"
    return f"{s.model.moe.experts} experts do not split over ep {x.ep}"


def expert_ranks(_: Setting, x: Layouts) -> Column:
    """ep takes whole dimensions, innermost first, so each step of the ladder must divide evenly.

    Of dp it takes a part of a group of shards, or several whole groups.
    """
    inner, shard = x.tp * x.cp, np.where(x.zero > 0, x.dp_shard, x.dp)
    in_tp = (x.ep <= x.tp) & _divides(x.ep, x.tp)
    in_cp = (x.ep > x.tp) & (x.ep <= inner) & _divides(x.tp, x.ep) & _divides(x.ep // x.tp, x.cp)
    of_dp = x.ep // inner
    nested = _divides(of_dp, shard) | (_divides(shard, of_dp) & _divides(of_dp, x.dp))
    in_dp = (x.ep > inner) & _divides(inner, x.ep) & nested
    return (x.ep == 1) | in_tp | in_cp | in_dp


def expert_ranks_reason(_: Setting, x: Layout) -> str:
    shards = f" (shards of {x.dp_shard})" if x.zero else ""
    return f"ep {x.ep} does not divide tp {x.tp} x cp {x.cp} x dp {x.dp}{shards} from the inside out"


def sequence_cp(s: Setting, x: Layouts) -> Column:
    parts = np.where((x.cp_kind == RING) | (x.cp_kind == ALLGATHER), 2 * x.cp, x.cp)
    return (x.cp == 1) | (s.workload.seq_len % parts == 0)


def sequence_tp(s: Setting, x: Layouts) -> Column:
    return (x.sp == 0) | (s.workload.seq_len % (x.tp * x.cp) == 0)


def ulysses(s: Setting, x: Layouts) -> Column:
    kv = np.maximum(s.model.attention_kv_heads // x.tp, 1)
    dealt = _divides(x.tp * x.cp, s.model.n_heads) & ((kv % x.cp == 0) | (x.cp % kv == 0))
    return (x.cp_kind != ULYSSES) | dealt


def shards(_: Setting, x: Layouts) -> Column:
    return _divides(x.dp_shard, x.dp) & ((x.zero > 0) | (x.dp_shard == 1))


def something_to_shard(_: Setting, x: Layouts) -> Column:
    return (x.zero == 0) | (x.dp_shard * x.cp > 1)


def batch(s: Setting, x: Layouts) -> Column:
    return x.micro_batch * x.accumulation * x.dp == s.workload.global_batch


def batch_reason(s: Setting, x: Layout) -> str:
    product = x.micro_batch * x.accumulation * x.dp
    return (
        f"micro batch {x.micro_batch} x accumulation {x.accumulation} x dp {x.dp} = {product}, "
        f"the global batch is {s.workload.global_batch}"
    )


def devices(s: Setting, x: Layouts) -> Column:
    return x.tp * x.cp * x.pp * x.dp == s.n_devices


def devices_reason(s: Setting, x: Layout) -> str:
    return f"tp {x.tp} x cp {x.cp} x pp {x.pp} x dp {x.dp} = {x.devices}, there are {s.n_devices} devices"


def schedule_stages(_: Setting, x: Layouts) -> Column:
    fits = np.zeros(np.broadcast_shapes(x.schedule.shape, x.pp.shape, x.vpp.shape), dtype=bool)
    for code, need in enumerate(SCHEDULE_CONDITIONS):
        most_pp, most_vpp = (np.inf if most is None else most for most in (need.max_pp, need.max_vpp))
        ranks = (x.pp >= need.min_pp) & (x.pp <= most_pp)
        fits = fits | ((x.schedule == code) & ranks & (x.vpp >= need.min_vpp) & (x.vpp <= most_vpp))
    return fits


def schedule(_: Setting, x: Layouts) -> Column:
    return schedule_valid(x.schedule, x.pp, x.vpp, x.accumulation)


def schedule_reason(_: Setting, x: Layout) -> str:
    c = next(c for c in SCHEDULE_CONDITIONS if c.schedule == x.schedule)
    asks = [f"pp {c.min_pp} or more" if c.max_pp is None else f"pp {c.min_pp} to {c.max_pp}"]
    asks.append(f"vpp {c.min_vpp} or more" if c.max_vpp is None else f"vpp {c.min_vpp} to {c.max_vpp}")
    asks += ["at least as many micro batches as ranks"] if c.full_pipeline else []
    asks += ["micro batches in even rounds over the ranks"] if c.even_rounds else []
    return f"schedule {x.schedule} needs {', '.join(asks)}; got pp {x.pp}, vpp {x.vpp}, {x.accumulation} micro batches"


def every(_: Setting, x: Layouts) -> Column:
    return (x.reduce_gradients != _EVERY) | ((x.accumulation > 1) & (x.zero >= 2))


def recompute_layers(s: Setting, x: Layouts) -> Column:
    each = (s.model.n_layers + x.short_first + x.short_last) // (x.pp * x.vpp)
    return (x.recompute_layers == 0) | ((x.recompute == _FULL) & (x.recompute_layers < each))


def context_kind(s: Setting, x: Layouts) -> Column:
    named = (x.cp > 1) == (x.cp_kind != _NO_KIND)
    return named & ((x.cp == 1) | s.workload.fused_attention)


def workload_runs(s: Setting, x: Layouts) -> Column:
    return np.full_like(x.tp, not workload_reason(s), dtype=bool)


def workload_reason(s: Setting) -> str:
    """What the trainer cannot do of the workload; empty where it can do all."""
    work, model = s.workload, s.model
    found = [f"precision {work.precision}"] if work.precision not in _TRAINED_IN else []
    found += ["dropout"] if work.dropout else []
    found += [] if work.fused_attention else ["attention that is not fused"]
    found += [] if work.causal else ["attention that is not causal"]
    if model.position == "learned" and work.seq_len > model.positions:
        found.append(f"seq_len {work.seq_len} with {model.positions} learned positions")
    return f"the trainer does not run {', '.join(found)}" if found else ""


def sp_has_tp(_: Setting, x: Layouts) -> Column:
    return (x.sp == 0) | (x.tp > 1)


def experts_need_sp(_: Setting, x: Layouts) -> Column:
    return (x.ep == 1) | (x.tp == 1) | (x.sp == 1)


def short_needs_pp(_: Setting, x: Layouts) -> Column:
    return (x.pp > 1) | ((x.short_first == 0) & (x.short_last == 0))
