"""How fast the trainer is against torchtitan 0.2.2 on this machine's CPU: the same decoder, ranks and batch.

`python -m benchmarks.against_torchtitan --python PYTHON` starts both, lets them take steps in turn
(`benchmarks/turns.py`), and prints the ratio of each layout's pairs of steps; its interval is the notch of a box plot.
PYTHON is an interpreter that has torchtitan 0.2.2 and the torch that ours has. Its llama3 debugmodel is what both
train, in fp32, with fused AdamW, clipping and no recomputation; tp has sequence parallelism and a sharded loss on both
sides.
`benchmarks/torchtitan_in_turns.py` says what is patched.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.turns import PLACE, Side

_ROOT = Path(__file__).resolve().parent.parent
_VERSION = "0.2.2"
_THEIRS = "torchtitan_in_turns.py"
_SEQ_LEN, _LOCAL_BATCH = 256, 4
_MODEL = {
    "name": "debugmodel",
    "hidden_dim": 256,
    "n_layers": 6,
    "n_heads": 16,
    "n_kv_heads": 16,
    "ffn_dim": 768,
    "vocab_size": 2048,
    "rope_theta": 500000.0,
}
_WARM_STEPS = 3
_MOST_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The same layout in both programs' words."""

    ranks: int = 1
    dp: int = 1
    ours: dict[str, dict[str, object]]
    theirs: tuple[str, ...] = ()


_LAYOUTS = {
    "one": Layout(ours={}),
    "ddp": Layout(
        ranks=2,
        dp=2,
        ours={"optimization": {"zero_stage": 0}},
        theirs=("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"),
    ),
    "fsdp": Layout(
        ranks=2,
        dp=2,
        ours={"optimization": {"zero_stage": 3}},
        theirs=("--parallelism.data_parallel_shard_degree=2",),
    ),
    "tp": Layout(
        ranks=2,
        ours={"distributed": {"tp_size": 2, "sequence_parallel": True}},
        theirs=("--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_shard_degree=1"),
    ),
}


class Bench:
    """Both programs at once, from one folder."""

    def __init__(self, folder: Path, python: str, steps: int) -> None:
        self._folder, self._python, self._steps = folder, python, steps
        write_data(folder)

    def pairs(self, layout: Layout) -> Iterator[tuple[float, float]]:
        """Seconds of a step of ours and of the torchtitan step beside it; who comes first changes each time."""
        config = self._folder / "config.yaml"
        config.write_text(yaml.safe_dump(our_values(layout, self._steps + 1, self._folder / "ours")))
        theirs = (*their_arguments(self._folder, self._steps + 1), *layout.theirs)
        with (
            self._side("ours", layout.ranks, sys.executable, ("--config", str(config))) as a,
            self._side("torchtitan", layout.ranks, self._python, theirs) as b,
        ):
            for turn in range(self._steps):
                first, second = (a, b) if turn % 2 else (b, a)
                seconds = {side: side.turn() for side in (first, second)}
                if turn >= _WARM_STEPS:
                    yield seconds[a], seconds[b]

    @contextmanager
    def _side(self, name: str, ranks: int, python: str, arguments: Sequence[str]) -> Iterator[Side]:
        """One program that stands before its first step."""
        side = Side(self._folder / f"{name}.socket", ranks)
        # The other Python has no project of ours on its path.
        program = ("-m", "benchmarks.ours_in_turns") if name == "ours" else (str(_ROOT / "benchmarks" / _THEIRS),)
        start = (python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        log = (self._folder / f"{name}.log").open("w+")
        run = subprocess.Popen(  # noqa: S603 - our own command
            (*start, *program, *arguments),
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", PLACE: str(side.place)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            side.meet()
            yield side
        except (EOFError, OSError) as fault:
            log.seek(0)
            raise SystemExit(f"{name}: {fault!r}\n{log.read()[-3000:]}") from fault
        finally:
            run.terminate()
            run.wait(_MOST_SECONDS)
            side.close()
            log.close()


def our_values(layout: Layout, steps: int, output: Path) -> dict[str, object]:
    """config.yaml of a layout; each run begins anew."""
    values: dict[str, dict[str, object]] = {
        "model": dict(_MODEL),
        "training": {
            "micro_batch_size": _LOCAL_BATCH,
            "batch_size": _LOCAL_BATCH * layout.dp,
            "seq_len": _SEQ_LEN,
            "max_steps": steps,
            "lr": 1e-4,
            "output_dir": str(output),
            "checkpoint": {"interval": 0, "resume": False},
        },
        "optimization": {"precision": "fp32", "gradient_clip": 1.0},
        "distributed": {"dp_size": layout.dp},
    }
    for section, given in layout.ours.items():
        values[section] = {**values[section], **given}
    return dict(values)


def their_arguments(folder: Path, steps: int) -> tuple[str, ...]:
    """torchtitan's options besides the layout."""
    return (
        "--model.name=llama3",
        "--model.flavor=debugmodel",
        f"--model.hf_assets_path={folder / 'tokenizer'}",
        f"--training.dataset_path={folder / 'data'}",
        f"--training.local_batch_size={_LOCAL_BATCH}",
        f"--training.seq_len={_SEQ_LEN}",
        f"--training.steps={steps}",
        "--training.mixed_precision_param=float32",
        "--training.max_norm=1.0",
        "--optimizer.lr=1e-4",
        "--optimizer.implementation=fused",
        "--activation_checkpoint.mode=none",
        "--metrics.log_freq=1",
        "--metrics.disable_color_printing",
        "--comm.trace_buf_size=0",
        f"--job.dump_folder={folder / 'theirs'}",
    )


def write_data(folder: Path) -> None:
    """A tokenizer of 2000 words and texts of them: torchtitan's own are in its repository, not in its package."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    for name in ("tokenizer", "data"):
        (folder / name).mkdir()
    words = [f"w{place}" for place in range(2000)]
    marks = {"<bos>": 2000, "<eos>": 2001, "<unk>": 2002}
    tokenizer = Tokenizer(WordLevel({**{word: i for i, word in enumerate(words)}, **marks}, "<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    texts = (" ".join(words[(7 * i + 13 * j * j) % 2000] for j in range(300)) for i in range(1000))
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def check_version(python: str) -> None:
    """The shim knows one version."""
    code = "import importlib.metadata as m; print(m.version('torchtitan'), m.version('torch'))"
    asked = subprocess.run((python, "-c", code), capture_output=True, text=True, check=False)  # noqa: S603
    if asked.returncode or asked.stdout.split()[0] != _VERSION:
        raise SystemExit(f"{python} has no torchtitan {_VERSION}: {(asked.stdout + asked.stderr).strip()[-300:]}")


def compare(bench: Bench, name: str) -> str:
    """One row: tokens/s of the median steps, and how many times as fast ours is, by pairs."""
    layout = _LAYOUTS[name]
    pairs = list(bench.pairs(layout))
    ratios = sorted(theirs / ours for ours, theirs in pairs)
    tokens = _SEQ_LEN * _LOCAL_BATCH * layout.dp / layout.ranks
    rates = [tokens / statistics.median(side) for side in zip(*pairs, strict=True)]
    tenth = len(ratios) // 10
    half = 1.57 * (ratios[len(ratios) * 3 // 4] - ratios[len(ratios) // 4]) / len(ratios) ** 0.5
    return (
        f"{name}: ours {rates[0]:.0f}, torchtitan {rates[1]:.0f} tokens/s a device; ours / torchtitan "
        f"{statistics.median(ratios):.3f} +- {half:.3f} (10-90 % of {len(ratios)} pairs: {ratios[tenth]:.2f}-"
        f"{ratios[-1 - tenth]:.2f}), load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="an interpreter that has torchtitan 0.2.2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layouts", nargs="+", choices=tuple(_LAYOUTS), default=list(_LAYOUTS))
    given = parser.parse_args()
    check_version(given.python)
    for name in given.layouts:
        with tempfile.TemporaryDirectory() as folder:
            print(compare(Bench(Path(folder), given.python, given.steps), name), flush=True)


if __name__ == "__main__":
    main()
