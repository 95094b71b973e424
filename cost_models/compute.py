"""Compute time and FLOPs of a part of the model (a layer, embedding, head) from the operator table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cost_models.calibration import Calibration
    from cost_models.cluster import DeviceSpec
    from cost_models.layout import Column
    from cost_models.operator_values import Gemm, Operator
    from cost_models.stack import Stack
    from cost_models.workload import Workload

# Output tiles that GEMM libraries choose from, as shares of the device's full tile: (rows, columns, rate against the
# full tile). Smaller tiles reuse operands less; the rates are what the operand traffic of such a tile leaves.
_TILES = ((1.0, 1.0, 1.0), (1.0, 0.5, 0.93), (0.5, 0.5, 0.85))
_MOST_SPLITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """Seconds on the device for one micro batch of one part, communication apart.

    Attributes:
        selective_s, full_s: what recomputing selectively or wholly adds to backward.
        forward_kernels, backward_kernels: launches; the host bounds their rate.
        forward_flops, backward_flops, selective_flops, full_flops: FLOPs that the device really computes.
        attention_forward_s, attention_backward_s: of which fused or unfused attention, that ring exchange hides under.
    """

    forward_s: Column
    input_grad_s: Column
    weight_grad_s: Column
    selective_s: Column
    full_s: Column
    forward_kernels: float
    backward_kernels: float
    selective_kernels: float
    forward_flops: Column
    backward_flops: Column
    selective_flops: Column
    full_flops: Column
    attention_forward_s: Column
    attention_backward_s: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeModel:
    """Times operators on one device. Per operator: the longer of arithmetic and memory time, plus its launch."""

    device: DeviceSpec
    calibration: Calibration
    workload: Workload
    stack: Stack

    def part_time(self, operators: tuple[Operator, ...]) -> PartTime:
        """Sum of the operators of one part."""
        forward = [self._forward_s(op) for op in operators]
        weight = _total([self._weight_grad_s(op) for op in operators])
        input_grad = _total([self._input_grad_s(op) for op in operators])
        redone = [(op, s) for op, s in zip(operators, forward, strict=True) if op.redone_by in self.stack.selective]
        skipped = [
            s for op, s in zip(operators, forward, strict=True) if op.last and self.stack.recompute_to_last_saved
        ]
        forward_flops = _total([_forward_flops(op) for op in operators])
        skipped_flops = _total(
            [_forward_flops(op) for op in operators if op.last and self.stack.recompute_to_last_saved]
        )
        attention = [op for op in operators if op.name == "attention"]
        return PartTime(
            forward_s=_total(forward),
            input_grad_s=input_grad,
            weight_grad_s=weight,
            selective_s=_total([s for op, s in redone if op.redone_by]),
            full_s=_total(forward) - _total(skipped),
            forward_kernels=float(sum(op.forward_kernels for op in operators)),
            backward_kernels=float(sum(op.backward_kernels + len(op.gemms) for op in operators)),
            selective_kernels=float(sum(op.forward_kernels for op, _ in redone if op.redone_by)),
            forward_flops=forward_flops,
            backward_flops=_total([_backward_flops(op) for op in operators]),
            selective_flops=_total([_forward_flops(op) for op, _ in redone if op.redone_by]),
            full_flops=forward_flops - skipped_flops,
            attention_forward_s=_total([self._forward_s(op) for op in attention]),
            attention_backward_s=_total([self._input_grad_s(op) for op in attention]),
        )

    def _forward_s(self, op: Operator) -> Column:
        gemms = [self.gemm_s(g.m, g.k, g.n, g.count) for g in op.gemms]
        return _total(
            [*gemms, self._attention_s(op, backward=False), self._vector_s(op.forward_bytes, op.forward_kernels)]
        )

    def _input_grad_s(self, op: Operator) -> Column:
        gemms = [self.gemm_s(g.m, g.n, g.k, g.count) for g in op.gemms]
        # A product of two activations has a gradient for each; neither is a weight's that could wait.
        gemms += [self.gemm_s(g.k, g.m, g.n, g.count) for g in op.gemms if not g.accumulates_weight]
        vector = self._vector_s(op.backward_bytes, op.backward_kernels)
        return _total([*gemms, self._attention_s(op, backward=True), vector])

    def _weight_grad_s(self, op: Operator) -> Column:
        weights = [g for g in op.gemms if g.accumulates_weight]
        gemms = [self.gemm_s(g.k, g.m, g.n, g.count) for g in weights]
        return _total([*gemms, *(self._accumulation_s(g) for g in weights)])

    def _accumulation_s(self, gemm: Gemm) -> Column:
        """Adding a weight gradient to the accumulated one: read both, write one; free where the GEMM does it."""
        if self.stack.fused_accumulation:
            return np.asarray(0.0)
        each = self.workload.numbers.weight_bytes + 2 * self._gradient_bytes
        return self._vector_s(gemm.k * gemm.n * gemm.count * each, 1)

    def gemm_s(self, m: Column, k: Column, n: Column, count: Column | float = 1.0) -> Column:
        """Seconds of `count` products [m, k] x [k, n]: whole tiles in whole waves over the cores, or memory time.

        Each core computes one output tile at a time; a wave is one tile on every core. With fewer tiles than cores the
        inner dimension is split. `gemm_half_k` is the start and end of a tile, in inner steps.
        """
        device, fit = self.device, self.calibration
        rate = device.peak_flops(self.workload.numbers.compute) * fit.gemm_efficiency / device.cores
        best = np.asarray(np.inf)
        for rows, columns, relative in _TILES:
            tile_m, tile_n = device.gemm_tile_m * rows, device.gemm_tile_n * columns
            tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n) * np.ceil(count)
            splits = np.clip(np.floor(device.cores / tiles), 1.0, _MOST_SPLITS)
            waves = np.ceil(tiles * splits / device.cores)
            best = np.minimum(best, waves * 2.0 * tile_m * tile_n * (k / splits + fit.gemm_half_k) / (rate * relative))
        moved = (m * k + k * n + m * n) * count * self.workload.numbers.weight_bytes
        memory = moved / (device.memory_bandwidth_bytes_per_s * fit.vector_efficiency)
        return np.asarray(np.maximum(best, memory) + fit.gemm_launch_s)

    def _attention_s(self, op: Operator, *, backward: bool) -> Column:
        """Fused attention: its own efficiency by sequence; backward recomputes the scores."""
        fit = self.calibration
        share = fit.attention_backward_efficiency if backward else fit.attention_forward_efficiency
        reached = share * self.workload.seq_len / (self.workload.seq_len + fit.attention_half_seq)
        flops = op.attention_backward_flops if backward else op.attention_flops
        return np.asarray(flops / (self.device.peak_flops(self._attention_precision) * reached))

    @property
    def _attention_precision(self) -> str:
        """Attention stays in the device's half precision where GEMMs run in fp8."""
        compute = self.workload.numbers.compute
        return self.device.default_precision if compute == "fp8" else compute

    def _vector_s(self, n_bytes: Column | float, kernels: int) -> Column:
        fit = self.calibration
        busy = n_bytes / (self.device.memory_bandwidth_bytes_per_s * fit.vector_efficiency)
        return np.asarray(busy + np.where(np.asarray(n_bytes) > 0, kernels * fit.vector_launch_s, 0.0))

    @property
    def _gradient_bytes(self) -> int:
        """Of an accumulated gradient; the stack's choice is one of mixed precision."""
        numbers = self.workload.numbers
        return self.stack.gradient_bytes if numbers.main_weight_bytes else numbers.weight_bytes

    def optimizer_s(self, parameters: Column) -> Column:
        """Update of `parameters` elements: reads gradient, main weight, moments; writes the last two and the copy."""
        numbers, fit = self.workload.numbers, self.calibration
        state = self.workload.optimizer_state_bytes + (numbers.main_weight_bytes or numbers.weight_bytes)
        copy = numbers.weight_bytes if numbers.main_weight_bytes else 0
        moved = parameters * (self._gradient_bytes + 2 * state + copy)
        return np.asarray(moved / (self.device.memory_bandwidth_bytes_per_s * fit.optimizer_efficiency))


def _forward_flops(op: Operator) -> Column:
    return _total([op.attention_flops, *(2.0 * g.m * g.k * g.n * g.count for g in op.gemms)])


def _backward_flops(op: Operator) -> Column:
    return _total([op.attention_backward_flops, *(4.0 * g.m * g.k * g.n * g.count for g in op.gemms)])


def _total(columns: list[Column] | list[Column | float]) -> Column:
    """Sum of columns that broadcast; zero for none."""
    total = np.asarray(0.0)
    for column in columns:
        total = total + column
    return total
