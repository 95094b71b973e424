"""Activations of one pipeline rank: what a layer keeps, how many layers are in flight, and when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cost_models.layout import RECOMPUTES
from cost_models.operators import padded_vocab, saved_bytes
from cost_models.pipeline_chunks import gathered_chunks, live_chunks, per_turn, waiting_chunks
from cost_models.schedules import GPIPE, ONE_F_ONE_B, ZB_V, ZERO_BUBBLE
from cost_models.stage_states import EVERY

if TYPE_CHECKING:
    from cost_models.layout import Column, Layouts
    from cost_models.operator_values import Operator, Saved
    from cost_models.parameters import Stage
    from cost_models.setting import Setting
    from cost_models.stage_parts import ModelParts

NONE, SELECTIVE, FULL = (RECOMPUTES.index(kind) for kind in ("none", "selective", "full"))
_FP32, _INT64 = 4, 8
# Layers whose offloaded activations are on the device: the one in use and the one on its way.
OFFLOAD_WINDOW = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """Virtual stages whose activations are alive as a backward begins, and the share of gradients that is there.

    One is equal to itself alone, so that what was formed for it can be kept by it.

    Attributes:
        chunks: virtual stages in flight.
        gradients: share of the rank's virtual stages whose gradients of earlier micro batches are accumulated.
        over: backwards of this rank that came before.
        reduced: share of the virtual stages whose gradients are reduced for good.
    """

    chunks: Column
    gradients: Column
    over: Column
    reduced: Column

    @property
    def earlier(self) -> Column:
        """Whether a backward of this rank came before."""
        return np.asarray(self.over > 0)


class StageActivations:
    """Bytes that depend on micro batch, recomputation, offload and schedule."""

    def __init__(self, setting: Setting, layouts: Layouts, parts: ModelParts, stage: Stage) -> None:
        self._s, self._x, self._parts, self._stage = setting, layouts, parts, stage
        self._stays: dict[tuple[int, int], tuple[Column, Column | float, Column, Column]] = {}

    @cached_property
    def per_virtual_stage(self) -> Column:
        """Layers of a virtual stage of this rank, the mean."""
        return self._stage.layers / self._x.vpp

    @cached_property
    def longest(self) -> Column:
        """Layers of its longest virtual stage."""
        return np.ceil(self.per_virtual_stage)

    @cached_property
    def own(self) -> Column:
        """A hidden state between layers."""
        return boundary_bytes(self._s, self._x)

    @cached_property
    def full(self) -> Column:
        """A hidden state of all tokens of the tp group."""
        tokens = self._x.micro_batch * float(self._s.workload.seq_len) / self._x.cp
        return tokens * self._s.model.hidden_dim * self._s.workload.numbers.activation_bytes

    @cached_property
    def again(self) -> Column:
        """What gathering a hidden state makes beside it."""
        return np.where((self._x.sp == 1) & (self._x.tp > 1), self.full, 0.0)

    def mean_layer(self, redone: frozenset[str]) -> Column:
        """Saved bytes of a layer, the mean of the stage's kinds."""
        dense, moe = saved_bytes(self._parts.dense, redone), saved_bytes(self._parts.moe, redone)
        return self._stage.total(np.asarray(dense), np.asarray(moe)) / np.maximum(self._stage.layers, 1)

    @cached_property
    def checkpoint(self) -> Column:
        """What a recomputed layer keeps: its input."""
        return _named(self._parts.dense or self._parts.moe, "attention_norm_input")

    def by_recompute(self, none: Column, selective: Column, full: Column) -> Column:
        """The value of the layout's kind of recomputation."""
        x = self._x
        return np.where(x.recompute == FULL, full, np.where(x.recompute == SELECTIVE, selective, none))

    @cached_property
    def _whole_layer(self) -> Column:
        return self.mean_layer(frozenset())

    @cached_property
    def kept_per_layer(self) -> Column:
        """Bytes that a layer keeps in flight under the layout's recomputation, the mean of the virtual stage."""
        x, none = self._x, self._whole_layer
        share = np.where(x.recompute_layers > 0, 1.0 - self.whole_layers / np.maximum(self.per_virtual_stage, 1), 1.0)
        full = share * self.checkpoint + (1.0 - share) * none
        return self.by_recompute(none, self.mean_layer(self._s.stack.selective), full)

    @cached_property
    def in_part(self) -> Column:
        """Whether the first layers of a virtual stage are recomputed and the others keep all."""
        return (self._x.recompute == FULL) & (self._x.recompute_layers > 0)

    @cached_property
    def _some_in_part(self) -> bool:
        return bool(np.any(self.in_part))

    @cached_property
    def whole_layers(self) -> Column:
        """Layers of a virtual stage that is recomputed in part which keep all: the last ones."""
        return np.where(self.in_part, np.maximum(self.per_virtual_stage - self._x.recompute_layers, 0.0), 0.0)

    def from_top(self, count: Column | float) -> Column:
        """Bytes that the last layers of a virtual stage keep, so many of them."""
        if not self._some_in_part:
            return np.asarray(count * self.kept_per_layer)
        whole = np.minimum(count, self.whole_layers)
        parted = whole * self._whole_layer + (count - whole) * self.checkpoint
        return np.where(self.in_part, parted, count * self.kept_per_layer)

    @cached_property
    def _rank(self) -> Column:
        return np.clip(self._stage.rank, 0, self._x.pp - 1)

    @cached_property
    def chunks(self) -> Column:
        """Virtual stages in flight at the most, those that wait for weight gradients left out."""
        x = self._x
        live = live_chunks(x.schedule, x.pp, x.vpp, x.accumulation, self._rank)
        return np.where(x.schedule == ZERO_BUBBLE, self.late[0], live)

    @cached_property
    def late(self) -> tuple[Column, Column]:
        """Virtual stages in flight, and those that wait for weight gradients, where most of these do."""
        x = self._x
        return waiting_chunks(x.schedule, x.pp, x.vpp, x.accumulation, self._rank)

    @cached_property
    def waiting(self) -> Column:
        """Virtual stages that wait for weight gradients all the time."""
        return np.where(self._x.schedule == ZERO_BUBBLE, self.late[1], 0)

    @cached_property
    def sends_of_stage(self) -> Column:
        """Bytes that a virtual stage has under way: the last send of 1F1B, otherwise the last two.

        A single micro batch of several virtual stages is sent on by each, and sent back.
        """
        x = self._x
        each = np.where((x.accumulation == 1) & (x.vpp == 1), 1, 2)
        sends = np.where(x.schedule == ONE_F_ONE_B, 1, each)
        return np.where(x.pp > 1, sends * self.own, 0.0)

    def unsent(self, over: Column) -> Column:
        """What is not under way yet as so many backwards are over: a send of each back, all of the head's stage."""
        x, over = self._x, np.maximum(over, 0)
        back = np.where((x.pp > 1) & (x.vpp > 1) & (x.accumulation == 1), np.maximum(x.vpp - over, 0.0) * self.own, 0.0)
        sent = np.where(x.vpp > 1, self.sends_of_stage, self.own)
        of_head = np.where(
            (x.vpp > 1) & (x.accumulation == 1), self.own, np.maximum(self.sends_of_stage - over * sent, 0.0)
        )
        return back + np.where(x.pp > 1, self._stage.has_head * of_head, 0.0)

    @property
    def total(self) -> Column:
        """Backwards of the rank."""
        return self._x.accumulation * self._x.vpp

    def after(self, backwards: Column, chunks: Column) -> InFlight:
        """So many in flight as so many backwards are over. Each round of them brings one more chunk's gradients."""
        x, over = self._x, backwards - self.waiting
        rounds = np.floor((over - 1) / self.per_turn) + 1
        # Those that are reduced each time are there as accumulated, but for a single time.
        done = self.single & ((x.reduce_gradients != EVERY) | (x.accumulation == 1))
        through = np.where(done, np.maximum(np.floor(over / self.per_turn), 0), 0.0)
        gradients = np.clip((rounds - through) / x.vpp, 0, self.share)
        return InFlight(chunks, gradients, backwards, np.minimum(through / x.vpp, 1))

    @cached_property
    def fullest(self) -> InFlight:
        """The latest backward but the last with the most in flight."""
        return self.after(self.total - np.maximum(self.chunks + self.waiting, 2), self.chunks)

    @cached_property
    def latest(self) -> InFlight:
        """The latest backward but the last with most weight gradients left behind."""
        return self.after(self.total - np.maximum(self.late[0], 2), self.late[0])

    def before_all(self, at: InFlight) -> InFlight:
        """The same as the virtual stage whose turn is last has no gradients yet."""
        return replace(at, gradients=np.minimum(at.gradients, (self._x.vpp - 1.0) / self._x.vpp))

    @cached_property
    def risen(self) -> InFlight:
        """The first backward after `fullest` with one more virtual stage's gradients."""
        return self._with_rounds(self.full_rounds + 1)

    @cached_property
    def full_rounds(self) -> Column:
        """Virtual stages that have gradients at `fullest`."""
        over = self.total - np.maximum(self.chunks + self.waiting, 2) - self.waiting
        return np.floor((over - 1) / self.per_turn) + 1

    @cached_property
    def steady(self) -> InFlight:
        """The first backward with all gradients accumulated; nothing in flight where that is the last, or none is."""
        return self._with_rounds(self._x.vpp)

    def _with_rounds(self, rounds: Column) -> InFlight:
        """The first backward with the gradients of so many virtual stages, if it is not the last one."""
        x = self._x
        left = self.total - (rounds - 1) * self.per_turn - 1 - self.waiting
        there = (left > 1) & (rounds <= x.vpp) & (x.accumulation > 1)
        chunks = np.where(there, np.clip(left, 1, self.chunks), 0.0)
        return replace(self.after((rounds - 1) * self.per_turn + 1 + self.waiting, chunks), chunks=chunks)

    @cached_property
    def last(self) -> InFlight:
        """The last backward of the virtual stage that comes first in backward."""
        left = (self._x.vpp - 1) * self.per_turn + 1
        return self.after(self.total - left, np.minimum(left, self.chunks))

    @cached_property
    def final(self) -> InFlight:
        """The last backward of all."""
        x = self._x
        accumulated = np.where(x.reduce_gradients == EVERY, self.share, np.minimum(self.share, 1.0 / x.vpp))
        reduced = np.where(x.reduce_gradients == EVERY, 0.0, (x.vpp - 1.0) / x.vpp)
        return InFlight(np.ones_like(self.chunks), accumulated, self.total - 1, reduced)

    @cached_property
    def last_inputs(self) -> tuple[InFlight, InFlight]:
        """The last two backwards of all where weight gradients come later, which are behind them."""
        two = np.minimum(self.chunks, 2)
        return self.after(self.total - 1, np.ones_like(self.chunks)), self.after(self.total - 2, two)

    @cached_property
    def over(self) -> InFlight:
        """All but one micro batch are through."""
        over = (self._x.accumulation - 1) * self._x.vpp
        return InFlight(np.ones_like(self.chunks), self.share, over, 0.0 * self.share)

    @cached_property
    def share(self) -> Column:
        """Virtual stages with accumulated gradients at the most. In a single round each is reduced before the next."""
        x = self._x
        share = np.where(self.single & (x.reduce_gradients != EVERY), 1.0 / x.vpp, 1.0)
        return np.where(x.accumulation > 1, share, 0.0)

    @cached_property
    def single(self) -> Column:
        """Whether the virtual stages of a rank run all their backwards one after another."""
        x = self._x
        # A folded rank turns as many micro batches around in its second stage before the first one's backwards begin.
        most = np.where(x.schedule == ZB_V, x.pp - self._rank, x.pp)
        return (x.vpp > 1) & (x.accumulation <= most)

    @cached_property
    def per_turn(self) -> Column:
        """Backwards of one virtual stage before the next one's."""
        return per_turn(self._x.schedule, self._x.pp, self._x.accumulation, self._rank)

    def alive(self, chunks: Column, waiting: Column) -> Column:
        """Activations of so many virtual stages, on the device or off it."""
        return self.per_virtual_stage * (chunks * self.kept_per_layer + waiting * self.deferred) + self._ends(
            chunks, waiting
        )

    @cached_property
    def _kept_per_virtual_stage(self) -> Column:
        return self.per_virtual_stage * self.kept_per_layer

    def on_device(
        self,
        chunks: Column,
        waiting: Column | float = 0.0,
        gone: Column | float = 0.0,
        window: Column | float | None = None,
        top: Column | float | None = None,
        *,
        forward: bool = False,
    ) -> Column:
        """The same without what is offloaded: of layers the one in use and the one on its way are on the device.

        A pipeline holds the input of each virtual stage until its backward. What is outside of layers stays, and so
        does what waits for weight gradients.

        Args:
            gone: layers of the virtual stage in backward that are through.
            window: layers on the device where the rest is offloaded.
            top: layers above these; those that are through if None.
            forward: the first layer's input is still the virtual stage's; backward brings a copy of it.
        """
        stays, inputs = self._staying(chunks, waiting)
        layers = chunks * self._kept_per_virtual_stage
        if not (isinstance(gone, float) and gone == 0.0):
            layers = np.maximum(layers - self.from_top(gone), 0.0)
        if self._offloads.any():
            window = self.window if window is None else window
            above = gone if top is None else top
            there = self.from_top(above + window) - self.from_top(above) + inputs
            if forward:
                there = there - np.where(above + window >= self.longest, self._first_input, 0.0)
            layers = np.where(self._offloads, np.minimum(layers, there), layers)
        return layers + stays

    @cached_property
    def _first_input(self) -> Column:
        """What a virtual stage received, if no embedding makes it."""
        received = np.where(self._x.vpp == 1, 1.0 - self._stage.has_embedding, 1.0)
        return np.where(self._x.pp > 1, received * self.own, 0.0)

    @cached_property
    def window(self) -> Column:
        """Layers whose offloaded activations are on the device at once."""
        return np.minimum(self.longest, OFFLOAD_WINDOW)

    @cached_property
    def _offloads(self) -> Column:
        return np.asarray(self._x.activation_offload == 1)

    def _staying(self, chunks: Column, waiting: Column | float) -> tuple[Column, Column]:
        """What no offload takes, and inputs of virtual stages."""
        key = id(chunks), id(waiting)
        if key not in self._stays:
            received = chunks * (1.0 - self._stage.has_embedding / self._x.vpp)
            inputs = np.where(self._x.pp > 1, received * self.own, 0.0)
            waits = self.per_virtual_stage * waiting * self.deferred
            # The columns are kept along, so that their numbers stay their own.
            self._stays[key] = chunks, waiting, waits + self._ends(chunks, waiting), inputs
        return self._stays[key][2], self._stays[key][3]

    def _ends(self, chunks: Column, waiting: Column | float) -> Column:
        """Kept by embedding and head."""
        parts, stage = self._parts, self._stage
        embedding = stage.has_embedding * np.asarray(saved_bytes(parts.embedding))
        return np.ceil(chunks / self._x.vpp) * embedding + self.heads(chunks, waiting) * self.head

    @cached_property
    def head(self) -> Column:
        """What the head keeps of a micro batch."""
        return self._stage.has_head * np.asarray(saved_bytes(self._parts.head))

    @cached_property
    def shares_table(self) -> Column:
        """Whether embedding and head are one parameter of this rank."""
        return np.asarray(self._s.model.tied_embeddings & (self._x.pp * self._x.vpp == 1))

    @cached_property
    def head_behind(self) -> Column:
        """What of it is gone as layers run backward: the gradient of a shared table waits for the embedding's."""
        if not self._s.stack.loss_chunk_tokens:
            return self.head
        table = padded_vocab(self._s.model.vocab_size, self._x.tp.astype(float)) / self._x.tp * self._s.model.hidden_dim
        waits = table * self._s.workload.numbers.activation_bytes
        return self.head - np.where(self.shares_table, waits, 0.0)

    @cached_property
    def deferred(self) -> Column:
        """What a layer keeps from its input gradients to its weight gradients, the mean of the stage's kinds."""
        dense, moe = (
            self._parts.backward("none", sparse=sparse).deferred if operators else np.asarray(0.0)
            for sparse, operators in ((False, self._parts.dense), (True, self._parts.moe))
        )
        return self._stage.total(dense, moe) / np.maximum(self._stage.layers, 1)

    def heads(self, chunks: Column, waiting: Column | float) -> Column:
        """Micro batches whose losses are alive: the last virtual stage turns each around at once, but GPipe runs all
        forwards first. A loss in chunks has made its weight gradient already; others wait for it as layers do.
        """
        alive = np.where(self._x.schedule == GPIPE, chunks, np.minimum(chunks, 1))
        waits = self._s.stack.loss_chunk_tokens == 0
        return alive + waiting * (waits & (self._x.schedule == ZERO_BUBBLE))

    @cached_property
    def gathered_chunks(self) -> Column:
        """Virtual stages with weights at once where each backward frees its own."""
        return gathered_chunks(self._x.schedule, self._x.pp, self._x.vpp, self._rank)

    @cached_property
    def split(self) -> Column:
        """Whether weight gradients come later than input gradients."""
        return (self._x.schedule == ZERO_BUBBLE) | (self._x.schedule == ZB_V)

    @cached_property
    def inputs(self) -> Column:
        """Tokens and labels of the step, and the table of positions."""
        x, m = self._x, self._s.model
        tokens = x.accumulation * x.micro_batch * float(self._s.workload.seq_len) * _INT64
        table = 1.5 * self._s.workload.seq_len / x.cp * m.head_dim * _FP32 if m.position == "rope" else 0.0
        return tokens * (1 + 2 / x.cp) + table


def boundary_bytes(setting: Setting, layouts: Layouts) -> Column:
    """One micro batch's activations at a stage boundary; sequence parallelism sends each rank's part only."""
    tokens = layouts.micro_batch * float(setting.workload.seq_len) / layouts.cp
    own = np.where(layouts.sp == 1, tokens / layouts.tp, tokens)
    return own * setting.model.hidden_dim * setting.workload.numbers.activation_bytes


def _named(operators: tuple[Operator, ...], name: str) -> Column:
    """Bytes of a saved tensor of the table."""
    found: list[Saved] = [s for op in operators for s in op.saved if s.name == name]
    return found[0].n_bytes
