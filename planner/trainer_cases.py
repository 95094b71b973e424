"""Layouts by chance on which the cost model is held against the trainer, and what a dry run finds for each."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster, find_model
from cost_models.errors import TitanPlanError
from cost_models.layout import Layout, Layouts
from cost_models.rules import first_violations
from cost_models.setting import Setting
from cost_models.stack import TITAN
from cost_models.workload import Workload

from .bounds import Bounds
from .dry_setting import worst_rank
from .space import Space

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CLUSTER = "atlas-800t-a2"
MODELS = ("llama2-7b", "llama2-70b", "qwen3-8b", "mixtral-8x7b")
DEVICES = (8, 16, 32, 64)
SEED = 20
_SEQUENCES = (2048, 4096, 8192)
# Of the global batch, sequences a device: more micro batches repeat what a few do.
_BATCHES = (1, 2, 4)
_PRECISIONS = ("bf16", "bf16", "bf16", "bf16", "bf16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCase:
    """One layout of a catalogue model, and the rank of it that is looked at: the first of the fullest stage.

    Attributes:
        n_layers: of the model; fewer than it has for a quick look.
    """

    model: str
    n_layers: int
    n_devices: int
    seq_len: int
    global_batch: int
    precision: str
    layout: Layout
    rank: int = 0

    def setting(self) -> Setting:
        """What the layout is predicted under."""
        return _setting(self.model, self.n_layers, self.n_devices, self.seq_len, self.global_batch, self.precision)

    @classmethod
    def read(cls, values: dict[str, Any]) -> TrainerCase:
        """From its JSON object."""
        return cls(**(values | {"layout": Layout(**values["layout"])}))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerResult:
    """What a dry run of a case found.

    Attributes:
        memory_bytes: live bytes at the peak by category of the dry run.
    """

    case: TrainerCase
    peak_bytes: int
    memory_bytes: dict[str, int]
    moment: str
    seconds: float

    @classmethod
    def read(cls, line: str) -> TrainerResult:
        """From a line of a file of results."""
        values = json.loads(line)
        case = TrainerCase.read(values.pop("case"))
        return cls(case=case, **{name: values[name] for name in (f.name for f in fields(cls)) if name != "case"})

    def line(self) -> str:
        """The same as a line of JSON."""
        return json.dumps(asdict(self))


def _setting(model: str, n_layers: int, n_devices: int, seq_len: int, batch: int, precision: str) -> Setting:
    spec = find_model(model)
    cluster = find_cluster(CLUSTER)
    return Setting(
        model=spec if n_layers == spec.n_layers else replace(spec, n_layers=n_layers),
        workload=Workload(seq_len=seq_len, global_batch=batch, precision=precision),
        cluster=cluster,
        stack=TITAN,
        calibration=calibration_of(cluster.device.name),
        n_devices=n_devices,
    )


def draw_cases(count: int, seed: int = SEED, layers: dict[str, int] | None = None) -> Iterator[TrainerCase]:
    """Valid layouts by chance, each as likely as any other of its model, devices, sequence, batch and precision.

    Args:
        layers: of a model, instead of all that it has.
    """
    chance = random.Random(seed)  # noqa: S311 - a sample, no secret
    for number in range(count):
        model = MODELS[number % len(MODELS)]
        n_layers = (layers or {}).get(model) or find_model(model).n_layers
        n_devices = DEVICES[number // len(MODELS) % len(DEVICES)]
        seq_len, batch = chance.choice(_SEQUENCES), n_devices * chance.choice(_BATCHES)
        precision = chance.choice(_PRECISIONS)
        setting = _setting(model, n_layers, n_devices, seq_len, batch, precision)
        layout = _draw(setting, chance)
        yield TrainerCase(
            model=model,
            n_layers=n_layers,
            n_devices=n_devices,
            seq_len=seq_len,
            global_batch=batch,
            precision=precision,
            layout=layout,
            rank=worst_rank(setting, layout),
        )


def _draw(setting: Setting, chance: random.Random) -> Layout:
    """A valid layout of the setting's space: a schedule that it has, then any of its layouts."""
    space = Space(setting=setting, bounds=Bounds())
    rows = list(space.rows(space.meshes()))
    schedules = sorted({int(code) for each in rows for code in np.unique(each.schedule)})
    while True:
        schedule = chance.choice(schedules)
        weights = [int((each.schedule == schedule).sum()) * each.layouts_per_row for each in rows]
        (drawn,) = chance.choices(rows, weights)
        place = chance.choice(np.flatnonzero(drawn.schedule == schedule).tolist())
        block = drawn.keep(np.array([place])).block()
        layout = _in_part(setting, block.take(np.array([chance.randrange(block.size)])).one(0), chance)
        if (np.asarray(first_violations(setting, Layouts.of([layout]))).reshape(-1) < 0).all():
            return layout


def _in_part(setting: Setting, layout: Layout, chance: random.Random) -> Layout:
    """Of half of those that recompute all layers some number of them, as a search does at its end."""
    layers = setting.model.n_layers // (layout.pp * layout.vpp)
    if layout.recompute != "full" or layers < 2 or chance.random() < 0.5:
        return layout
    return replace(layout, recompute_layers=chance.randint(1, layers - 1))


def run_case(case: TrainerCase) -> TrainerResult:
    """Dry-run a case; imports torch."""
    from runtime.config_values import TrainConfig
    from runtime.dry_run.reduced import reduced_dry_run

    setting = case.setting()
    config = TrainConfig(model=setting.model, workload=setting.workload, layout=case.layout, cluster=CLUSTER)
    run = reduced_dry_run(config, case.rank)
    return TrainerResult(
        case=case,
        peak_bytes=run.peak_bytes,
        memory_bytes=dict(run.memory_bytes),
        moment=run.moment,
        seconds=run.seconds,
    )


def read_results(path: Path) -> list[TrainerResult]:
    """All results of a file, none where there is no file; a torn last line is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [_result(path, number, line) for number, line in enumerate(lines, start=1) if line.endswith("\n")]


def _result(path: Path, number: int, line: str) -> TrainerResult:
    try:
        found = TrainerResult.read(line)
        sized = found.peak_bytes > 0 and 0 <= found.case.rank < found.case.layout.devices
        valid = sized and np.all(first_violations(found.case.setting(), Layouts.of([found.case.layout])) < 0)
    except (ValueError, TypeError, LookupError, AttributeError, TitanPlanError):
        valid = False
    if not valid:
        message = f"{path} line {number} is not a result: {line.strip()[:60]}"
        raise TitanPlanError("C603", message, "delete the line; --run makes it again")
    return found
