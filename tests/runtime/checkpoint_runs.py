"""Runs of a few steps that save and resume, as each rank of a case plays them."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cost_models.rank_grid import RankGrid
from runtime import checkpoint_storage
from runtime.assembly import assemble
from runtime.checkpoint import Checkpoints
from runtime.device import open_device
from runtime.engine import Engine
from tests.runtime.parity.training import LR, batches, config_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from runtime.config_values import TrainConfig
    from runtime.parallel.trainable import Whole as PlaceInWhole

Curve = list[tuple[float, float]]
Whole = dict[str, torch.Tensor]


class Run:
    """What the trainer does with its checkpoints, on random tokens."""

    def __init__(self, model: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], folder: str) -> None:
        self.config: TrainConfig = config_of(model, sections)
        device = open_device("cpu", 0)
        self.assembly = assemble(self.config, device)
        self.engine = Engine(self.config, self.assembly, device)
        options = self.config.training.checkpoint
        self.checkpoints = Checkpoints(Path(folder), options, self.config, self.engine, self.assembly, device)
        self.at = 0

    def resume(self) -> int:
        """Load the newest checkpoint; the step, or 0 where there is none."""
        found = self.checkpoints.newest()
        if found is not None:
            progress = self.checkpoints.load(found)
            self.at = progress.step
            assert progress.position == self.at * self.config.workload.global_batch
        return self.at

    def steps(self, until: int) -> Curve:
        """Train up to a step."""
        layout, curve = self.config.layout, []
        rank = dist.get_rank() if layout.devices > 1 else 0
        dp = RankGrid.of(layout).coordinates(rank).dp
        for whole in batches(self.config, until)[self.at :]:
            mine = whole.view(layout.accumulation, layout.dp, layout.micro_batch, -1)[:, dp]
            found = self.engine.step(mine, LR)
            curve.append((found.loss, found.grad_norm))
        self.at = until
        return curve

    def save(self, *, wait: bool = True) -> None:
        """Save the step that was reached."""
        self.checkpoints.save(self.at, self.at * self.config.workload.global_batch, wait=wait)

    def digest(self) -> str:
        """Of all bits of weights, state and router biases on this rank."""
        found = hashlib.sha256()
        states = self.engine.optimizer.state()
        for trainable in self.engine.trainables:
            _add(found, trainable.name, trainable.weight)
            for key, value in sorted(states.get(trainable.name, {}).items()):
                _add(found, f"{trainable.name}.{key}", value)
        for chunk in self.assembly.chunks:
            for name, buffer in chunk.module.named_buffers():
                if name.endswith("router.bias"):
                    _add(found, name, buffer)
        return found.hexdigest()


def _add(found: Any, name: str, tensor: torch.Tensor) -> None:  # noqa: ANN401 - hashlib's own type has no name
    found.update(name.encode())
    found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def straight(
    model: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], folder: str, save_at: int, until: int
) -> tuple[Curve, str]:
    """Train to the end, with a save beside training in the middle; losses behind the save, and the last digest."""
    run = Run(model, sections, folder)
    run.steps(save_at)
    run.save(wait=False)
    curve = run.steps(until)
    run.checkpoints.finish()
    return curve, run.digest()


def resumed(
    model: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], folder: str, until: int
) -> tuple[int, Curve, str]:
    """Train to the end from the newest checkpoint."""
    run = Run(model, sections, folder)
    start = run.resume()
    return start, run.steps(until), run.digest()


def saved_then_killed(
    model: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], folder: str, victims: tuple[int, ...]
) -> None:
    """Save step 1; die by SIGKILL in the middle of writing step 2's tensors."""
    run = Run(model, sections, folder)
    run.steps(1)
    run.save()
    run.steps(2)
    rank = dist.get_rank() if dist.is_initialized() else 0

    def die() -> None:
        if rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)

    _before_each_tensor(3, die)
    run.save()


def saved_on_full_disk(
    model: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], folder: str, full_rank: int, number: int
) -> dict[str, Any]:
    """Steps 1 to 4 are saved, and the disk is full at 2 and 4."""
    run = Run(model, sections, folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    told: dict[str, Any] = {}

    def fill() -> None:
        if rank == full_rank:
            raise OSError(number, os.strerror(number), "somewhere")

    for step in (1, 2, 3, 4):
        run.steps(step)
        restore = _before_each_tensor(2, fill) if step in {2, 4} else None
        try:
            run.save(wait=step == 4)
        except Exception as error:  # noqa: BLE001 - which one is what the test asks
            told[f"error {step}"] = str(error)
        run.checkpoints._settle(final=False)
        if restore:
            restore()
        if dist.is_initialized():
            dist.barrier()
        told[f"names {step}"] = sorted(path.name for path in Path(folder).iterdir())
        if dist.is_initialized():
            dist.barrier()
    try:
        run.checkpoints.finish()
    except Exception as error:  # noqa: BLE001
        told["error at the end"] = str(error)
    return told


def _before_each_tensor(count: int, act: Callable[[], None]) -> Callable[[], None]:
    """Act before the tensor of that number is written; returns what undoes it."""
    kind, left = checkpoint_storage._SavePlanner, [count]
    plain = kind.lookup_object

    def lookup(self: Any, index: Any) -> torch.Tensor:  # noqa: ANN401
        left[0] -= 1
        if left[0] == 0:
            act()
        return plain(self, index)

    kind.lookup_object = lookup  # type: ignore[method-assign]

    def undo() -> None:
        kind.lookup_object = plain  # type: ignore[method-assign]

    return undo


def whole_state(run: Run) -> Whole:
    """Every tensor that this rank has a part of, put together by torch itself, without the vocabulary's padding."""
    found: Whole = {}
    states = run.engine.optimizer.state()
    for trainable in run.engine.trainables:
        state = states.get(trainable.name, {})
        # Ranks with an empty part have no state, but take part in putting it together.
        moments = {key: state.get(key, torch.zeros_like(trainable.weight)) for key in ("exp_avg", "exp_avg_sq")}
        for key, local in {"weight": trainable.weight, **moments}.items():
            whole = _put_together(local, trainable.whole)
            if trainable.name in {"embedding.weight", "head.weight"}:
                whole = whole[: run.config.model.vocab_size]
            name = "embedding.weight" if trainable.borrowed else trainable.name
            assert f"{name} {key}" not in found or torch.equal(found[f"{name} {key}"], whole)
            found[f"{name} {key}"] = whole
    for chunk in run.assembly.chunks:
        found |= {name: buffer.clone() for name, buffer in chunk.module.named_buffers() if name.endswith("router.bias")}
    return found


def _put_together(local: torch.Tensor, whole: PlaceInWhole) -> torch.Tensor:
    if whole.mesh is None:
        return local.clone()
    strides = [1]
    for length in reversed(whole.shape[1:]):
        strides.insert(0, strides[0] * length)
    made = DTensor.from_local(
        local, whole.mesh, whole.placements, shape=torch.Size(whole.shape), stride=tuple(strides)
    ).full_tensor()
    assert isinstance(made, torch.Tensor)
    return made.clone()  # of a replicated tensor it is the tensor itself, which training goes on to change


def saved_whole(
    model: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], folder: str, step: int
) -> tuple[Whole, Curve]:
    """Train, save, tell the state; and the loss of the step behind."""
    run = Run(model, sections, folder)
    run.steps(step)
    run.save()
    whole = whole_state(run)
    return whole, run.steps(step + 1)


def loaded_whole(
    model: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], folder: str
) -> tuple[Whole, Curve]:
    """The same from the other side."""
    run = Run(model, sections, folder)
    step = run.resume()
    whole = whole_state(run)
    return whole, run.steps(step + 1)
