"""How fast the trainer is against torchtitan 0.2.2 on this machine's CPU: the same decoder, ranks and batch.

`python -m benchmarks.against_torchtitan --python PYTHON` starts both alternately, one process a rank, and prints the
ratio of each layout's pairs. PYTHON is an interpreter that has torchtitan 0.2.2 and the torch that ours has. Its
llama3 debugmodel is what both train, in fp32, with fused AdamW, clipping and no recomputation; tp has sequence
parallelism and a sharded loss on both sides. `benchmarks/torchtitan_shim.py` says what is patched.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

_ROOT = Path(__file__).resolve().parent.parent
_VERSION = "0.2.2"
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
_TPS = re.compile(r"step:\s*(\d+)\s.*?tps:\s*([\d,]+)")


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
    """Launches of both programs from one folder."""

    def __init__(self, folder: Path, python: str, steps: int) -> None:
        self._folder, self._python, self._steps = folder, python, steps
        write_data(folder)

    def ours(self, layout: Layout) -> float:
        """Tokens/s of a device: the median step of a run of ours."""
        config = self._folder / "config.yaml"
        config.write_text(yaml.safe_dump(our_values(layout, self._steps, self._folder / "ours")))
        self._launch(sys.executable, layout.ranks, ("-m", "runtime.train", "--config", str(config)))
        with (self._folder / "ours" / "metrics.csv").open() as lines:
            rows = list(csv.DictReader(lines))
        return statistics.median(float(row["tokens_per_s_per_device"]) for row in rows[_WARM_STEPS:])

    def theirs(self, layout: Layout) -> float:
        """The same of torchtitan, from the lines that it prints."""
        arguments = (*their_arguments(self._folder, self._steps), *layout.theirs)
        shim = str(Path(__file__).with_name("torchtitan_shim.py"))
        told = self._launch(self._python, layout.ranks, (shim, *arguments))
        rates = {int(step): float(rate.replace(",", "")) for step, rate in _TPS.findall(told)}
        if len(rates) != self._steps:
            raise SystemExit(f"torchtitan told {len(rates)} of {self._steps} steps\n{told[-3000:]}")
        return statistics.median(rate for step, rate in rates.items() if step > _WARM_STEPS)

    def _launch(self, python: str, ranks: int, command: Sequence[str]) -> str:
        start = (python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        done = subprocess.run(  # noqa: S603 - our own command
            (*start, "--local-ranks-filter=0", *command),
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_MOST_SECONDS,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed\n{done.stdout[-3000:]}")
        return done.stdout


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


def compare(bench: Bench, name: str, pairs: int) -> str:
    """One row: medians and the ratios of pairs, the order within a pair turned each time."""
    layout = _LAYOUTS[name]
    ours, theirs = [], []
    for turn in range(pairs):
        if turn % 2:
            theirs.append(bench.theirs(layout))
        ours.append(bench.ours(layout))
        if not turn % 2:
            theirs.append(bench.theirs(layout))
        print(f"  {name}: ours {ours[-1]:.0f}, torchtitan {theirs[-1]:.0f}, load {os.getloadavg()[0]:.1f}", flush=True)
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return (
        f"{name}: ours {statistics.median(ours):.0f}, torchtitan {statistics.median(theirs):.0f} tokens/s a device; "
        f"ours / torchtitan {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}, {pairs} pairs)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="an interpreter that has torchtitan 0.2.2")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layouts", nargs="+", choices=tuple(_LAYOUTS), default=list(_LAYOUTS))
    given = parser.parse_args()
    check_version(given.python)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), given.python, given.steps)
        for row in [compare(bench, name, given.pairs) for name in given.layouts]:
            print(row)


if __name__ == "__main__":
    main()
