"""How fast a training step is on this machine: against a plain PyTorch loop, and where its time goes.

`python -m benchmarks.training_speed` runs both alternately in one process and prints ratios of medians. Steps differ by
tens of percent on a shared machine; only ratios of paired runs mean something.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import torch

from benchmarks.plain_loop import PlainLoop
from runtime.assembly import assemble
from runtime.config import parse_config
from runtime.device import open_device
from runtime.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.config import TrainConfig

_SHAPES = {
    "small": {"hidden_dim": 256, "n_layers": 6, "n_heads": 16, "n_kv_heads": 16, "ffn_dim": 768, "vocab_size": 2048},
    "wide": {"hidden_dim": 512, "n_layers": 4, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 1536, "vocab_size": 8192},
}


def config_of(shape: str, accumulation: int, micro_batch: int, seq_len: int) -> TrainConfig:
    """One process in full precision."""
    values = {
        "model": {"name": shape, **_SHAPES[shape]},
        "training": {
            "micro_batch_size": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "batch_size": micro_batch * accumulation,
            "seq_len": seq_len,
        },
        "optimization": {"precision": "fp32"},
    }
    return parse_config(values, "benchmark")


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def against_plain(shape: str, repeats: int) -> tuple[float, float, list[float]]:
    """Median seconds of ours and of the plain loop, and the ratio plain / ours of each pair."""
    config = config_of(shape, 2, 4, 256)
    device = open_device("cpu", 0)
    engine = Engine(config, assemble(config, device), device)
    plain = PlainLoop(config.model, config.workload.seq_len)
    data = torch.randint(0, config.model.vocab_size, (2, 4, 257))
    ours: list[float] = []
    theirs: list[float] = []
    for turn in range(repeats + 2):
        pair = [lambda: engine.step(data, 1e-3), lambda: plain.step(data)]
        times = [0.0, 0.0]
        for place in (0, 1) if turn % 2 else (1, 0):
            times[place] = seconds(pair[place])
        if turn > 1:
            ours.append(times[0])
            theirs.append(times[1])
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(ours), statistics.median(theirs), ratios


def shares(shape: str, repeats: int) -> dict[str, float]:
    """Shares of a step: forward with backward, optimizer, and the rest (data on the device, norm, loop)."""
    config = config_of(shape, 2, 4, 256)
    device = open_device("cpu", 0)
    engine = Engine(config, assemble(config, device), device)
    spent = {"forward and backward": 0.0, "optimizer": 0.0}
    _timed(engine, "_forward_backward", spent, "forward and backward")
    _timed(engine, "_update", spent, "optimizer")
    data = torch.randint(0, config.model.vocab_size, (2, 4, 257))
    engine.step(data, 1e-3)
    spent.update(dict.fromkeys(spent, 0.0))
    total = sum(seconds(lambda: engine.step(data, 1e-3)) for _ in range(repeats))
    found = {name: value / total for name, value in spent.items()}
    return {**found, "the rest": 1.0 - sum(found.values())}


def _timed(engine: Engine, name: str, spent: dict[str, float], key: str) -> None:
    inner = getattr(engine, name)

    def timed(*arguments: object) -> object:
        began = time.perf_counter()
        try:
            return inner(*arguments)
        finally:
            spent[key] += time.perf_counter() - began

    setattr(engine, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for shape in _SHAPES:
        ours, theirs, ratios = against_plain(shape, repeats)
        low, high = sorted(ratios)[len(ratios) // 10], sorted(ratios)[-1 - len(ratios) // 10]
        print(
            f"{shape}: ours {ours * 1e3:.0f} ms, plain {theirs * 1e3:.0f} ms a step; tokens/s of ours over plain "
            f"{statistics.median(ratios):.2f} (10-90 %: {low:.2f}-{high:.2f}, {len(ratios)} pairs)"
        )
        print("   " + ", ".join(f"{name} {share:.1%}" for name, share in shares(shape, repeats).items()))


if __name__ == "__main__":
    main()
