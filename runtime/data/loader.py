"""DataLoader: a data-parallel rank's share of each global batch, read one step ahead by a thread."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    import torch

    from .sequences import TokenSequences


class DataLoader:
    """Batches by position: it holds no state that a checkpoint would need.

    The step at `position` takes sequences position .. position + global_batch - 1 of the endless stream, whatever the
    split; row b of micro batch a of rank r is number position + (a * dp + r) * micro_batch + b.

    Args:
        sequences: what batches are cut from.
        global_batch: micro_batch * accumulation * dp.
        micro_batch: sequences that a rank takes at once.
        accumulation: micro batches that a rank takes in a step.
        dp_rank: 0 .. dp - 1; ranks of one tensor, context or pipeline group share it.
        dp: data-parallel ranks.

    Raises:
        TitanPlanError: B501 the sizes contradict each other.
    """

    def __init__(
        self,
        sequences: TokenSequences,
        *,
        global_batch: int,
        micro_batch: int,
        accumulation: int,
        dp_rank: int,
        dp: int,
    ) -> None:
        if micro_batch * accumulation * dp != global_batch:
            problem = (
                f"micro_batch_size {micro_batch} x gradient_accumulation_steps {accumulation} x dp_size {dp} = "
                f"{micro_batch * accumulation * dp}, batch_size is {global_batch}"
            )
            raise TitanPlanError("B501", problem, "the product has to be the batch size")
        if not 0 <= dp_rank < dp:
            raise ValueError(f"dp_rank {dp_rank} of {dp}")
        self._sequences = sequences
        self._global_batch = global_batch
        self._offsets = [
            [(a * dp + dp_rank) * micro_batch + b for b in range(micro_batch)] for a in range(accumulation)
        ]
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="titan-plan-data")
        self._ahead: tuple[int, Future[NDArray[np.int64]]] | None = None

    def batch(self, position: int) -> torch.Tensor:
        """This rank's share of the step that begins at sequence `position`; the next one is then read ahead.

        Returns:
            int64, (accumulation, micro_batch, seq_len + 1), on the CPU.

        Raises:
            TitanPlanError: what reading the tokens raised, in the thread as well.
        """
        import torch

        ahead, self._ahead = self._ahead, None
        rows = ahead[1].result() if ahead is not None and ahead[0] == position else self._read(position)
        if self._thread is not None:
            following = position + self._global_batch
            self._ahead = (following, self._thread.submit(self._read, following))
        return torch.from_numpy(rows)

    def close(self) -> None:
        """End the thread; later batches are read without it."""
        thread, self._thread, self._ahead = self._thread, None, None
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _read(self, position: int) -> NDArray[np.int64]:
        return np.stack([np.stack([self._sequences(position + k) for k in row]) for row in self._offsets])
