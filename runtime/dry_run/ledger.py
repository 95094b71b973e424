"""Which memory is alive when: every storage of a step with its birth, its death and what it was for."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .torch_fake import backward_node, is_fake, storage_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import Tensor

FOREVER = 1 << 60


@dataclass(slots=True, eq=False)
class Held:
    """One piece of memory from its birth to its death.

    Attributes:
        born, died: numbers of events; a piece is alive from `born` until before `died`.
        born_in, died_in: numbers of passes.
        label: category where it is known from outside; otherwise its life tells.
        owner: parameter that it belongs to, where that is known.
    """

    n_bytes: int
    born: int
    born_in: int
    shape: tuple[int, ...]
    dtype: str
    made_by: str
    module: str
    label: str = ""
    owner: str = ""
    on_host: bool = False
    died: int = FOREVER
    died_in: int = FOREVER


class Ledger:
    """The storages of one device.

    Args:
        counts: whether an operator's result is a tensor of the run.

    Attributes:
        events: births, deaths and resizes so far.
        passes: names of the passes of the step so far; the last one runs.
        module: whose forward or backward runs.
    """

    def __init__(self, counts: Callable[[object], bool] = is_fake) -> None:
        self._counts = counts
        self.events = 0
        self.passes: list[str] = ["building"]
        self.module = ""
        self.records: list[Held] = []
        self._open: dict[int, Held] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def begin_pass(self, name: str) -> None:
        """A forward, a backward or something between begins."""
        self.passes.append(name)

    def begin_step(self) -> None:
        """Forget what is over; what is alive was born before the step."""
        self.records = list(self._open.values())
        self.passes, self.events, self.module = ["before the step"], 0, ""
        for record in self.records:
            record.born, record.born_in = 0, 0
            record.label = record.label or "buffers"

    def see(self, tensors: Iterable[object], made_by: str) -> None:
        """Note the tensors that an operator returned; their memory may be known already."""
        for x in tensors:
            if self._counts(x):
                self._see(x, made_by)  # type: ignore[arg-type]

    def _see(self, x: Tensor, made_by: str) -> None:
        storage = x.untyped_storage()
        key = storage_key(x)
        if key in self._open:
            return
        node = backward_node()
        name = f"{made_by} in {node}" if node else made_by
        self._alive[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._birth(key, Held(storage.nbytes(), 0, 0, tuple(x.shape), str(x.dtype)[6:], name, self.module))

    def _birth(self, key: int, record: Held) -> None:
        record.born, record.born_in = self.events, len(self.passes) - 1
        self.events += 1
        self._open[key] = record
        self.records.append(record)

    def _death(self, record: Held) -> None:
        record.died, record.died_in = self.events, len(self.passes) - 1
        self.events += 1

    def _gone(self, key: int) -> None:
        record = self._open.pop(key, None)
        self._alive.pop(key, None)
        if record is not None:
            self._death(record)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage lives on with another size: one piece ends, another of the same kind begins."""
        key, size = storage._cdata, storage.nbytes()
        before = self._open.get(key)
        if before is None:
            return
        if before.n_bytes == size:
            return
        self._death(before)
        after = Held(size, 0, 0, before.shape, before.dtype, before.made_by, self.module or before.module)
        after.label, after.owner, after.on_host = before.label, before.owner, before.on_host
        self._birth(key, after)

    def label(self, tensors: Iterable[Tensor], category: str, owner: str = "") -> None:
        """Say what memory is for, and of which parameter."""
        for x in tensors:
            record = self._open.get(storage_key(x))
            if record is not None:
                record.label = category
                record.owner = owner or record.owner

    def to_host(self, x: Tensor) -> None:
        """This memory is the host's."""
        self.see((x,), "host memory")
        self._open[storage_key(x)].on_host = True


def category_of(record: Held) -> str:
    """The category of a piece: its label, or what its life says."""
    if record.label:
        return record.label
    if record.born_in == 0:
        return "buffers"  # tokens and labels: they are there before the first pass
    return "temporaries" if record.born_in == record.died_in else "activations"
