"""The layout that one row of a run table names, in the words that published tables use.

Degrees: tp, pp, cp, ep, vpp default to 1, dp to n_devices / (tp x pp x cp), n_devices to the product; a row that
gives none of tp, pp, dp names no layout. Of micro_batch, `accumulation` and global_batch two are enough.
ZeRO: a text with `fsdp` is stage 3 unless it names another (`fsdp-grad-op(zero2)`, `zero2-like`); `distopt`,
`parallel_optimizer`, `bf16-optimizer` are stage 1; `zero` is read where zero_stage_or_distopt is empty. The shard group
is dp_shard, else what `group 8` says, else all of dp. Empty: stage 3 for the stack fsdp, 1 where the options name a
distributed optimizer or NeMo (whose recipes turn it on), else 0.
Schedule: any vpp above 1 is interleaved; ZB-1p and ZB-2p are our "zero-bubble" with one virtual stage (ZB-2p holds
up to twice the activations, which is not modelled), ZB-V is "zb-v" with two; `one layer per chunk` gives vpp.
Recompute: `layers=N` counts layers of a virtual stage (Megatron's block method), of a pipeline rank with
enable-recompute-layers-per-pp-rank; `layers=[6, 3, 2, 3]` is taken as its mean, rounded. Empty: none.
sp: empty is on where tp > 1, except for the stack megatron-deepspeed, which has none. cp: the kind is cp_kind, else
read from the options (context-parallel-algo, `a2a`), else ring, Megatron's own.
short_first, short_last: where one is given, an empty other is 0. Both empty: layers that do not split over pp x vpp,
but do with two more, leave first and last stage one layer short, where embedding and head stand (Llama 3, BLOOM,
zero-bubble); for the stack titan, and for runs whose outcome is ok, what the search deals out, up to MOST_SHORT of
them. Other uneven splits are not modelled: rule D201 refuses them.
ep: Megatron cuts experts by tp as well (expert-tensor-parallel-size, by default tp; NeMo's recipes set 1), which a
layout cannot say; ep x tp ranks that hold the same bytes stand for it where the experts divide.
swap_optimizer, activation_offload: empty is what the options name (swap-optimizer, act_cpu_offload=true), else off.
placement: empty is tp-cp-dp-pp. reduce_gradients: empty is last, but for FSDP with accumulation every micro batch, as
PyTorch's FSDP without no_sync does.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cost_models.layout import CP_KINDS, PLACEMENTS, REDUCTIONS, Layout

from .run_cells import IncompleteRunError, missing, unreadable
from .space import MOST_SHORT

if TYPE_CHECKING:
    from cost_models.model import ModelSpec
    from cost_models.stack import Stack

    from .run_cells import Cells


# Several times the largest cluster there is; the cost of a group that straddles nodes is counted rank by rank.
_MOST_DEVICES = 100_000
_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees that multiply to the devices."""

    tp: int
    cp: int
    pp: int
    dp: int
    n_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of a step: what one pass takes, how many passes, and all of them."""

    micro: int
    accumulation: int
    whole: int


def degrees_of(cells: Cells) -> Degrees:
    """The degrees of a row; IncompleteRunError where they do not multiply to the devices."""
    columns = ("tp", "pp", "dp", "n_devices", "cp")
    tp, pp, dp, n, cp = (cells.whole(column, at_most=_MOST_DEVICES) for column in columns)
    if tp is None and pp is None and dp is None:
        raise missing("tp", "pp and dp are empty too: the row names no layout")
    if n is None and dp is None:
        raise missing("n_devices", "give it, or dp")
    tp, pp, cp = tp or 1, pp or 1, cp or 1
    inner = tp * pp * cp
    dp = dp or max(1, (n or inner) // inner)
    n = n or min(inner * dp, _MOST_DEVICES)
    if inner * dp != n:
        text = f"tp {tp} x cp {cp} x pp {pp} x dp {dp} = {inner * dp}, n_devices is {n}"
        raise IncompleteRunError("degrees do not multiply to n_devices", text)
    return Degrees(tp=tp, cp=cp, pp=pp, dp=dp, n_devices=n)


def batch_of(cells: Cells, dp: int) -> Batch:
    """The batch of a row; one that is no exact product is left to rule B501, which shows the arithmetic."""
    micro, steps, whole = (cells.whole(column) for column in ("micro_batch", "accumulation", "global_batch"))
    if whole is None:
        if micro is None or steps is None:
            raise missing("global_batch")
        whole = micro * steps * dp
    if micro is None:
        if steps is None and whole != dp:
            raise missing("micro_batch")
        micro = max(1, whole // (dp * (steps or 1)))
    return Batch(micro=micro, accumulation=steps or max(1, whole // (micro * dp)), whole=whole)


def layout_of(
    cells: Cells, degrees: Degrees, batch: Batch, model: ModelSpec, stack: Stack
) -> tuple[Layout, tuple[str, ...]]:
    """The layout of a row, and in words what of it is only approximated."""
    d = degrees
    schedule, vpp, notes = _schedule(cells, d.pp, model.n_layers)
    first, last = _shortage(cells, model.n_layers, d.pp * vpp, stack)
    per_stage = (model.n_layers + first + last) // (d.pp * vpp)
    recompute, recompute_layers, more_notes = _recompute(cells, per_stage, vpp)
    zero, shard = _zero(cells, stack, d)
    ep, ep_notes = _expert_degree(cells, d, model, stack)
    sp, swaps, offloads = (cells.flag(column) for column in ("sp", "swap_optimizer", "activation_offload"))
    kind = _context_kind(cells, d.cp)
    early = stack.name == "fsdp" and zero >= 2 and batch.accumulation > 1
    layout = Layout(
        tp=d.tp,
        sp=d.tp > 1 and (stack.name != "megatron-deepspeed" if sp is None else sp),
        cp=d.cp,
        cp_kind=kind,
        ep=ep,
        pp=d.pp,
        vpp=vpp,
        dp=d.dp,
        dp_shard=shard,
        zero=zero,
        micro_batch=batch.micro,
        accumulation=batch.accumulation,
        schedule=schedule,
        recompute=recompute,
        recompute_layers=recompute_layers,
        reduce_gradients=cells.word("reduce_gradients", REDUCTIONS) or ("every" if early else "last"),
        swap_optimizer="swap-optimizer" in cells.options if swaps is None else swaps,
        activation_offload=_offloads(cells) if offloads is None else offloads,
        placement=cells.word("placement", PLACEMENTS) or PLACEMENTS[0],
        short_first=first,
        short_last=last,
    )
    return layout, notes + more_notes + ep_notes


def _shortage(cells: Cells, n_layers: int, stages: int, stack: Stack) -> tuple[int, int]:
    """Layers that first and last stage are short; by default embedding and head stand for one each."""
    first, last = (cells.whole(name, at_least=0, at_most=_MOST_LAYERS) for name in ("short_first", "short_last"))
    if first is not None or last is not None:
        return first or 0, last or 0
    lacking = -n_layers % stages
    # titan: as Space deals them out, since plans.csv does not name them. A run that was measured did split its layers
    # somehow; of a layout that nobody has run only the split with both ends one short is taken as meant.
    known = stack.name == "titan" or cells.text("outcome").lower() == "ok"
    if lacking == 2 or (known and lacking <= MOST_SHORT):
        return lacking // 2, lacking - lacking // 2
    return 0, 0


def _offloads(cells: Cells) -> bool:
    return cells.options.get("act_cpu_offload", "").lower() == "true"


def sharding_of(cells: Cells) -> tuple[str, str]:
    """The column that names the ZeRO stage, and its text in lower case."""
    column = "zero" if cells.text("zero") and not cells.text("zero_stage_or_distopt") else "zero_stage_or_distopt"
    return column, cells.text(column).lower()


def _schedule(cells: Cells, pp: int, n_layers: int) -> tuple[str, int, tuple[str, ...]]:
    """Schedule, virtual stages a rank, and what is approximated."""
    text, vpp = cells.text("schedule").lower(), cells.whole("vpp") or 1
    known = ("1f1b", "interleaved", "zero-bubble", "zb-", "gpipe", "none")
    if text and not any(word in text for word in known):
        raise unreadable("schedule", text, "none, gpipe, 1f1b, interleaved, zero-bubble or zb-v is known")
    if pp == 1:
        return "none", 1, ()
    if "zb-v" in text:
        return "zb-v", 2, ()
    if "zb-" in text or "zero-bubble" in text:
        note = ("ZB-2p is predicted as ZB-1p, which holds fewer activations",) if "2p" in text else ()
        return "zero-bubble", vpp, note
    if "gpipe" in text:
        return "gpipe", vpp, ()
    if "one layer per chunk" in text:
        return "interleaved", math.ceil(n_layers / pp), ()
    if vpp > 1:
        return "interleaved", vpp, ()
    says = text.startswith(("interleaved", "custom interleaved"))
    return "1f1b", 1, ("interleaved without vpp is predicted as 1f1b",) if says and not cells.text("vpp") else ()


def _recompute(cells: Cells, per_stage: int, vpp: int) -> tuple[str, int, tuple[str, ...]]:
    """Recomputation, layers of each virtual stage (0 for all), and what is approximated."""
    text = cells.text("recompute").lower().replace(" ", "")
    if text in {"", "none", "0", "false", "no"}:
        return "none", 0, ()
    if text in {"full", "1", "true", "yes"}:
        return "full", 0, ()
    if text == "selective":
        return "selective", 0, ()
    found = re.fullmatch(r"layers=(\[?)([0-9]{1,4}(?:,[0-9]{1,4})*)\]?", text)
    if found is None:
        raise unreadable("recompute", text, "none, selective, full or layers=N is known")
    each = [int(number) for number in found[2].split(",")]
    mean = sum(each) / len(each)
    if "enable-recompute-layers-per-pp-rank" in cells.options:
        mean /= vpp
    layers = max(1, math.floor(mean + 0.5)) if mean else 0
    note = (f"recompute {text} is predicted as layers={layers} in every stage",) if len(each) > 1 else ()
    if not layers:
        return "none", 0, note
    return "full", 0 if layers >= per_stage else layers, note


def _expert_degree(cells: Cells, degrees: Degrees, model: ModelSpec, stack: Stack) -> tuple[int, tuple[str, ...]]:
    """Ranks over which experts are dealt, and what is approximated."""
    ep = cells.whole("ep", at_most=_MOST_DEVICES) or 1
    if ep == 1 or model.moe is None or not stack.name.startswith(("megatron", "mindspeed")):
        return ep, ()
    default = 1 if "nemo" in cells.text("other_flags").lower() else degrees.tp
    cut = cells.option_count("expert-tensor-parallel-size") or default
    if cut == 1:
        return ep, ()
    if model.moe.experts % (ep * cut):
        return ep, (f"experts cut by tp {cut} are predicted whole",)
    return ep * cut, (f"experts over ep {ep} and cut by tp {cut} are predicted as ep {ep * cut}",)


def _zero(cells: Cells, stack: Stack, degrees: Degrees) -> tuple[int, int]:
    """ZeRO stage and shard group; over one rank there is nothing to shard."""
    stage, shard = _zero_stage(cells, stack), cells.whole("dp_shard", at_most=_MOST_DEVICES)
    if stage == 0 or degrees.dp * degrees.cp == 1:
        return 0, shard or 1
    if shard:
        return stage, shard
    group = re.search(r"group\s*([0-9]{1,8})", sharding_of(cells)[1])
    return stage, max(1, min(int(group[1]), degrees.dp)) if group else degrees.dp


def _zero_stage(cells: Cells, stack: Stack) -> int:
    column, text = sharding_of(cells)
    if not text:
        nemo = "nemo" in cells.text("other_flags").lower()
        named = nemo or "use-distributed-optimizer" in cells.options
        return 3 if stack.name == "fsdp" else int(named)
    if text in {"0", "1", "2", "3", "0.0", "1.0", "2.0", "3.0"}:
        return int(text[0])
    stage = re.search(r"zero-?\s?([0-3])", text)
    if stage:
        return int(stage[1])
    if "fsdp" in text:
        return 3
    if text in {"none", "ddp", "no", "false"}:
        return 0
    if any(word in text for word in ("distopt", "distributed", "optimizer", "true")):
        return 1
    raise unreadable(column, text, "0 to 3, zero1, distopt or fsdp is known")


def _context_kind(cells: Cells, cp: int) -> str:
    given = cells.word("cp_kind", CP_KINDS)
    if cp == 1:
        return "none"
    if given == "none":
        raise unreadable("cp_kind", given, f"cp {cp} has a kind, one of {', '.join(CP_KINDS[1:])}")
    if given:
        return given
    said = f"{cells.options.get('context-parallel-algo', '')} {' '.join(cells.options)}"
    if "ulysses" in said or "a2a" in said:
        return "ulysses"
    return "allgather" if "kvallgather" in said else "ring"
