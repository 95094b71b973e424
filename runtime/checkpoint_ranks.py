"""Steps that all ranks take together, after which either all go on or all have the same error.

They have a gloo group of their own, so that what a background thread sends never meets what training sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

import torch.distributed as dist

from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
R = TypeVar("R")
_SLOWEST_WRITER: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """An error as it travels: not every exception survives pickling."""

    rank: int
    kind: str
    text: str
    errno: int | None = None
    filename: str | None = None
    ours: tuple[str, str, str, int] | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> _Failure:
        kind = type(error).__name__
        if isinstance(error, TitanPlanError):
            ours = (error.code, error.message, error.hint, error.exit_code)
            return cls(rank=rank, kind=kind, text=error.message, ours=ours)
        if isinstance(error, OSError):
            filename = None if error.filename is None else str(error.filename)
            return cls(rank=rank, kind=kind, text=error.strerror or str(error), errno=error.errno, filename=filename)
        return cls(rank=rank, kind=kind, text=str(error))

    def error(self) -> Exception:
        if self.ours is not None:
            code, message, hint, exit_code = self.ours
            return TitanPlanError(code, message, hint, exit_code=exit_code)
        if self.errno is not None:
            return OSError(self.errno, self.text, self.filename)
        return RuntimeError(f"{self.text or 'no reason given'} ({self.kind} on rank {self.rank})")


class Ranks:
    """All ranks of the run, or this process alone. Made by all ranks at the same time."""

    def __init__(self, *, alone: bool) -> None:
        self._group = None if alone else dist.new_group(backend="gloo", timeout=_SLOWEST_WRITER)
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def collect(self, work: Callable[[], T], digest: Callable[[list[T]], list[R]]) -> R:
        """Work on every rank; rank 0 makes an answer for each rank from what all found.

        Raises:
            Exception: the first rank's error, on every rank.
        """
        found = self._attempt(work)
        gathered: list[T | _Failure] = [found]
        if self._group is not None:
            slots: list[T | _Failure] | None = [found] * self.size if self.leads else None
            dist.gather_object(found, slots, dst=0, group=self._group)
            gathered = slots or []
        return self._handed_out(self._digested(gathered, digest) if self.leads else None)

    def first(self, work: Callable[[], T]) -> T:
        """Work on rank 0 for all."""
        return self.collect(lambda: None, lambda _: [work()] * self.size)

    def _attempt(self, work: Callable[[], T]) -> T | _Failure:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            return _Failure.of(error, self.rank)

    def _digested(self, gathered: list[T | _Failure], digest: Callable[[list[T]], list[R]]) -> list[R] | _Failure:
        failed = next((one for one in gathered if isinstance(one, _Failure)), None)
        found = [one for one in gathered if not isinstance(one, _Failure)]
        return self._attempt(lambda: digest(found)) if failed is None else failed

    def _handed_out(self, answers: list[R] | _Failure | None) -> R:
        if self._group is None:
            mine = answers if isinstance(answers, _Failure) else (answers or [])[0]
        else:
            given = [answers] * self.size if isinstance(answers, _Failure) else answers
            slot: list[R | _Failure] = [None]  # type: ignore[list-item]
            dist.scatter_object_list(slot, given, src=0, group=self._group)
            mine = slot[0]
        if isinstance(mine, _Failure):
            raise mine.error()
        return mine
