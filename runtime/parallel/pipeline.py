"""Pipeline parallelism: torch's schedules over our chunks, with their own split of backward for zero-bubble."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from cost_models.schedules import SPLIT_BACKWARD

from .torch_private import LeanStage, settle_shapes

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from cost_models.layout import Layout
    from runtime.models.decoder import Decoder

    from .data import DataParallel
    from .weight_gradients import WeightGradients

_SCHEDULES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


class _Opaque(nn.Module):
    """Hides FSDP from torch's stage, which would decide when to gather and reduce: the layout decides that."""

    def __init__(self, module: Decoder) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out: Tensor = self.module(x, labels)
        return out


class ChunkStage(LeanStage):
    """A stage that tells its data parallelism which backward is the last."""

    def __init__(
        self,
        module: Decoder,
        data: DataParallel,
        gradients: WeightGradients,
        layout: Layout,
        stage: int,
        boundary: Tensor,
        group: dist.ProcessGroup,
        first_input: Tensor,
    ) -> None:
        chunk = module.chunk
        super().__init__(
            _Opaque(module),
            stage,
            layout.pp * layout.vpp,
            boundary.device,
            input_args=first_input if chunk.first else boundary,
            output_args=torch.empty((), device=boundary.device) if chunk.last else boundary,
            group=group,
            dw_builder=gradients.take if layout.schedule in SPLIT_BACKWARD else None,
        )
        self.sends_itself = layout.schedule != "1f1b"
        self._data, self._gradients, self._micro_batches = data, gradients, layout.accumulation
        self._backwards = self._weights = 0

    def begin_step(self) -> None:
        """Count from the first micro batch again."""
        self._backwards = self._weights = 0

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Backward of one micro batch; without `full_backward` weight gradients wait until they are asked for."""
        del last_backward
        self._backwards += 1
        self._data.before_backward(last=self._backwards == self._micro_batches, split=not full_backward)
        self._gradients.deferring = not full_backward
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward)
        self._gradients.deferring = False
        self._weights += full_backward

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The deferred part of one micro batch's backward."""
        del last_backward
        super().backward_weight_one_chunk(bwd_chunk_id)
        self._weights += 1
        self._data.after_weights(last=self._weights == self._micro_batches)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Gradients are reduced by `DataParallel`, not by torch's stage."""


class Pipeline:
    """The chunks of this rank under their schedule."""

    def __init__(self, stages: list[ChunkStage], layout: Layout) -> None:
        self._stages = stages
        self._last = any(stage.is_last for stage in stages)
        self._first = any(stage.is_first for stage in stages)
        kind = _SCHEDULES[layout.schedule]
        single = issubclass(kind, PipelineScheduleSingle)
        self._schedule = kind(
            stages[0] if single else stages,  # type: ignore[arg-type]
            layout.accumulation,
            loss_fn=lambda output, _: output,
            scale_grads=False,
        )

    def settle_shapes(self) -> None:
        """Skip the exchange of shapes with the other ranks at the first step, for a run that has none."""
        settle_shapes(self._schedule)

    def run(self, tokens: Tensor, labels: Tensor) -> Tensor | None:
        """Forward and backward of all micro batches.

        Args:
            tokens, labels: (micro batches, tokens), on every rank.

        Returns:
            Scaled loss of the step on the rank with the last stage, None elsewhere.
        """
        for stage in self._stages:
            stage.begin_step()
        losses: list[Tensor] = []
        inputs = (tokens,) if self._first else ()
        self._schedule.step(
            *inputs, target=labels if self._last else None, losses=losses, return_outputs=False, labels=labels
        )
        for stage in self._stages:
            stage.finish_sends()
        return torch.stack([loss.detach() for loss in losses]).sum() if self._last else None
