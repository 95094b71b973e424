"""Layout, one way to spread a training step over devices, and Layouts, many of them as columns."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules import SCHEDULES, stage_rank

Column = NDArray[Any]

CP_KINDS = ("none", "ulysses", "allgather", "ring")
RECOMPUTES = ("none", "selective", "full")
REDUCTIONS = ("last", "every")
# From neighbour to far. Tensor parallelism talks most and stays innermost; the two differ in who crosses nodes.
PLACEMENTS = ("tp-cp-dp-pp", "tp-cp-pp-dp")

_CODES: dict[str, tuple[str, ...]] = {
    "cp_kind": CP_KINDS,
    "schedule": SCHEDULES,
    "recompute": RECOMPUTES,
    "reduce_gradients": REDUCTIONS,
    "placement": PLACEMENTS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One layout. tp * cp * pp * dp = devices; micro_batch * accumulation * dp = global batch.

    Attributes:
        sp: sequence parallelism inside the tp group.
        cp_kind: how attention sees the other parts of the sequence.
        ep: ranks that share out the experts, taken innermost first from tp, cp, dp; 1: experts are cut by tp.
        vpp: virtual stages a pipeline rank.
        dp_shard: data-parallel ranks that share out what `zero` shards; the cp ranks always shard along.
        recompute_layers: with recompute "full", layers recomputed in each virtual stage; 0 means all of them.
        reduce_gradients: gradients are reduced after the "last" micro batch of a step or after "every" one.
        short_first, short_last: layers that the first and the last virtual stage hold fewer than the others.
    """

    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_kind: str = "none"
    ep: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    dp_shard: int = 1
    zero: int = 0
    micro_batch: int = 1
    accumulation: int = 1
    schedule: str = "none"
    recompute: str = "none"
    recompute_layers: int = 0
    reduce_gradients: str = "last"
    swap_optimizer: bool = False
    activation_offload: bool = False
    placement: str = PLACEMENTS[0]
    short_first: int = 0
    short_last: int = 0

    @property
    def devices(self) -> int:
        """Devices that the layout takes."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def recompute_text(self) -> str:
        """`none`, `selective`, `full`, or `layers=N`."""
        return f"layers={self.recompute_layers}" if self.recompute_layers else self.recompute

    def stage_layers(self, n_layers: int) -> tuple[int, ...]:
        """Layers of each virtual stage in model order; they sum to n_layers."""
        stages = self.pp * self.vpp
        whole = (n_layers + self.short_first + self.short_last) // stages
        layers = [whole] * stages
        layers[0] -= self.short_first
        layers[-1] -= self.short_last
        return tuple(layers)

    def stages_on(self, pp_rank: int) -> tuple[int, ...]:
        """Virtual stages of a pipeline rank, in model order."""
        stages = range(self.pp * self.vpp)
        return tuple(stage for stage in stages if stage_rank(self.schedule, self.pp, stage) == pp_rank)

    @property
    def name(self) -> str:
        """The layout spelled out, such as `tp8-pp4-dp2-mbs1-vpp2-z1-full`; what is not used is left out."""
        parts = [f"tp{self.tp}"]
        parts += [f"cp{self.cp}{self.cp_kind}"] if self.cp > 1 else []
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        parts += [f"pp{self.pp}", f"dp{self.dp}", f"mbs{self.micro_batch}"]
        parts += [f"vpp{self.vpp}"] if self.vpp > 1 else []
        parts += [f"short{self.short_first}.{self.short_last}"] if self.short_first or self.short_last else []
        parts += [f"z{self.zero}"]
        parts += [f"shard{self.dp_shard}"] if self.zero and self.dp_shard != self.dp else []
        parts += [self.recompute_text.replace("=", "")] if self.recompute != "none" else []
        parts += ["nosp"] if self.tp > 1 and not self.sp else []
        parts += [self.schedule] if self.schedule in {"gpipe", "zero-bubble", "zb-v"} else []
        parts += ["every"] if self.reduce_gradients == "every" else []
        parts += ["swap"] if self.swap_optimizer else []
        parts += ["offload"] if self.activation_offload else []
        parts += ["dpfar"] if self.placement != PLACEMENTS[0] else []
        return "-".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Layouts as integer columns that broadcast against each other; texts are indices into their tuple.

    A column may have shape (rows,), or a shape that broadcasts with the others, such as (rows, 1, 1) beside (1, 3, 1):
    a quantity is then computed once for each combination that it really depends on. That, not the number of layouts,
    is what a search costs.
    """

    tp: Column
    sp: Column
    cp: Column
    cp_kind: Column
    ep: Column
    pp: Column
    vpp: Column
    dp: Column
    dp_shard: Column
    zero: Column
    micro_batch: Column
    accumulation: Column
    schedule: Column
    recompute: Column
    recompute_layers: Column
    reduce_gradients: Column
    swap_optimizer: Column
    activation_offload: Column
    placement: Column
    short_first: Column
    short_last: Column

    @classmethod
    def of(cls, layouts: list[Layout] | tuple[Layout, ...]) -> Layouts:
        """Columns of shape (len(layouts),)."""
        return cls(**{name: np.array([_encode(name, getattr(x, name)) for x in layouts]) for name in COLUMN_NAMES})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that all columns broadcast to."""
        return np.broadcast_shapes(*{getattr(self, name).shape for name in COLUMN_NAMES})

    @property
    def size(self) -> int:
        """Number of layouts."""
        return int(np.prod(self.shape, dtype=np.int64))

    def take(self, flat_indices: Column) -> Layouts:
        """The layouts at flat positions (C order) of the broadcast shape, as columns of one dimension."""
        where = np.unravel_index(flat_indices, self.shape)
        full = {name: np.broadcast_to(getattr(self, name), self.shape)[where] for name in COLUMN_NAMES}
        return Layouts(**full)

    def keep_rows(self, rows: Column) -> Layouts:
        """Keep indices of the first axis; columns that do not vary along it stay as they are."""
        varies = self.shape[0] > 1
        return Layouts(
            **{
                name: column if varies and column.shape[0] == 1 else column[rows]
                for name, column in ((name, getattr(self, name)) for name in COLUMN_NAMES)
            }
        )

    def one(self, flat_index: int) -> Layout:
        """The layout at a flat position."""
        where = np.unravel_index(flat_index, self.shape)
        return Layout(**{n: _decode(n, np.broadcast_to(getattr(self, n), self.shape)[where]) for n in COLUMN_NAMES})

    @staticmethod
    def joined(parts: list[Layouts]) -> Layouts:
        """One set of one-dimensional columns from several."""
        return Layouts(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in COLUMN_NAMES})


COLUMN_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Layouts))
_FLAGS = frozenset({"sp", "swap_optimizer", "activation_offload"})


def _encode(name: str, value: object) -> int:
    """A field of Layout as the integer of its column."""
    return _CODES[name].index(str(value)) if name in _CODES else int(value)  # type: ignore[call-overload]


def _decode(name: str, value: Any) -> Any:  # noqa: ANN401 - a field of Layout is a number, a flag or a text
    """The integer of a column as the field of Layout."""
    if name in _CODES:
        return _CODES[name][int(value)]
    return bool(value) if name in _FLAGS else int(value)
