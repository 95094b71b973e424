"""Tells the ledger which pass over which micro batch runs, in which module, and what known memory is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from runtime.parallel.torch_private import local_part

from .torch_fake import gathered_weights, waiting_gradients

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.assembly import Assembly, BuiltChunk
    from runtime.config_values import TrainConfig
    from runtime.engine import Engine

    from .ledger import Ledger


class Passes:
    """Follows one engine."""

    def __init__(self, ledger: Ledger, config: TrainConfig, assembly: Assembly, engine: Engine) -> None:
        self._ledger, self._config, self._assembly, self._engine = ledger, config, assembly, engine
        for number, chunk in enumerate(assembly.chunks):
            self._follow(chunk, number)
        _before(engine.optimizer, "step", lambda *_a, **_k: self._begin("update"))
        self.label_lasting()

    def label_lasting(self) -> None:
        """What lives through the whole step. What a step makes is labelled when the next pass begins."""
        ledger, zero = self._ledger, self._config.layout.zero
        computes_with_shards = zero in {0, 3} and self._config.workload.precision == "fp32"
        for t in self._engine.trainables:
            lows = () if t.low is None else (t.low,)
            ledger.label(lows, "weights", t.name)
            ledger.label((t.weight,), "weights" if computes_with_shards else "main_weights", t.name)
        for name, state in self._engine.optimizer.state().items():
            ledger.label(state.values(), "optimizer", name)
        self._label_passing()

    def _label_passing(self) -> None:
        gathered = "gathered" if self._config.layout.zero == 3 else "weights"
        for chunk in self._assembly.chunks:
            module = chunk.module
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    self._ledger.label((local_part(parameter.grad),), "gradients", name)
            for name, gradient in waiting_gradients(module):
                self._ledger.label((gradient,), "gradients", name)
            self._ledger.label(gathered_weights(module), gathered)
        for t in self._engine.trainables:
            own = t.gradient()
            if own is not None:
                self._ledger.label((own,), "gradients", t.name)

    def _begin(self, name: str) -> None:
        self._label_passing()
        self._ledger.begin_pass(name)

    def _follow(self, chunk: BuiltChunk, number: int) -> None:
        counts = {"forward": 0, "backward": 0}
        of_chunk = f", chunk {number}" if len(self._assembly.chunks) > 1 else ""

        def begins(kind: str) -> Callable[..., None]:
            def note(*_args: object, **_kwargs: object) -> None:
                counts[kind] += 1
                self._begin(f"{kind} of micro batch {counts[kind]}{of_chunk}")

            return note

        def starts_over(*_args: object, **_kwargs: object) -> None:
            counts.update(forward=0, backward=0)

        chunk.module.register_forward_pre_hook(begins("forward"))
        chunk.module.register_forward_hook(lambda _m, _i, out: self._forward_ended(chunk, out))
        _before(chunk.data, "begin_step", starts_over)
        _before(chunk.data, "before_backward", begins("backward"))
        _before(chunk.data, "finish", lambda *_a, **_k: self._begin("reduction of gradients"))
        for name, part in chunk.module.named_modules():
            if name:
                self._name(part, name)

    def _forward_ended(self, chunk: BuiltChunk, out: Tensor) -> None:
        if not chunk.module.chunk.last:
            self._ledger.label((out,), "pipeline_buffers")

    def _name(self, part: nn.Module, name: str) -> None:
        """Note which module's forward runs, and when backward enters it."""
        ledger = self._ledger
        outer: list[str] = []

        def enter(*_args: object) -> None:
            outer.append(ledger.module)
            ledger.module = name

        def leave(_module: nn.Module, _inputs: object, out: Any) -> None:  # noqa: ANN401
            ledger.module = outer.pop()
            node = getattr(out, "grad_fn", None)
            if node is not None:
                node.register_prehook(lambda _g: setattr(ledger, "module", name))

        part.register_forward_pre_hook(enter)
        part.register_forward_hook(leave)


def _before(owner: Any, method: str, tell: Callable[..., None]) -> None:  # noqa: ANN401
    """Call `tell` before each call of a method of one object."""
    inner = getattr(owner, method)

    def told(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        tell(*args, **kwargs)
        return inner(*args, **kwargs)

    setattr(owner, method, told)
