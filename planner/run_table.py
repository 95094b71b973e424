"""Run tables: a CSV of training runs, one a row, read to values that can be predicted, or to the reason why not.

Columns are those of the measurements (`id` ... `inter_node_gb_per_s_per_device`), in any order; all are optional,
others are kept and not read. The layout may be told in the words of plans.csv as well. Empty cells take what the caller
gives for their column, then defaults: those of the model in run_model.py, of the layout in run_layout.py, here those of
cluster, workload and stack:
- device: a name of the catalogue or a cluster file; empty, the text in `hardware`. devices_per_node and
  inter_node_gb_per_s_per_device override it.
- precision: empty is the device's half precision. Every fp8 form is "fp8"; NVFP4 too, since fp4 has no peak here.
- flash_attention: empty is 1, except where the program's own default is unfused attention: devices without bf16
  (V100: the kernels do not exist), the stack megatron-deepspeed (older than them), and megatron with a plain MLP
  (Megatron-LM's GPT examples; use-flash-attn is off by default) unless the options name flash attention,
  transformer_engine or NeMo; attention-backend=unfused is 0.
  The stack titan has fused attention only: its own trainer is what the search plans for.
- optimizer: empty is adamw.
- dropout: a plain MLP under the megatron stacks drops out, as GPT-2 and GPT-3 trained (Megatron's default of 0.1).
- stack (optional column): a name of cost_models/stack.py. Empty, what the row says of itself: FSDP -> fsdp; Ascend
  -> mindformers (parallel_optimizer), mindspeed-mc2 (use-mc2, or its notes say so), else mindspeed; DeepSpeed in its
  words -> megatron-deepspeed; else megatron.
- memory_quantity (optional column): `allocated` (torch's peak, the default) or `device` (what nvidia-smi shows).
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from cost_models.catalog import find_cluster
from cost_models.errors import TitanPlanError
from cost_models.stack import STACKS, Stack
from cost_models.workload import OPTIMIZER_STATE_BYTES, Workload

from .run_cells import Cells, IncompleteRunError, missing, unreadable
from .run_layout import batch_of, degrees_of, layout_of, sharding_of
from .run_model import model_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cost_models.cluster import ClusterSpec
    from cost_models.layout import Layout
    from cost_models.model import ModelSpec

_READ = (
    "model hidden layers heads kv_heads head_dim ffn vocab seq moe_experts moe_topk moe_ffn gated_mlp tied_embeddings "
    "hardware n_devices devices_per_node tp sp pp vpp dp cp cp_kind ep zero_stage_or_distopt schedule micro_batch "
    "accumulation global_batch recompute precision flash_attention other_flags notes outcome device "
    "inter_node_gb_per_s_per_device stack memory_quantity activation_offload swap_optimizer reduce_gradients placement "
    "dp_shard zero short_first short_last optimizer"
)
READ_COLUMNS: tuple[str, ...] = tuple(_READ.split())
# What predictions are compared with; the step_time_s of a plans.csv, told by its interval, is a prediction itself.
MEASURED_COLUMNS = ("step_time_s", "tokens_per_s_per_device", "samples_per_s")
_PREDICTED = {"step_time_s": "step_time_low_s"}
MEMORY_QUANTITIES = ("allocated", "device")
_LARGEST_NODE = 1024
_FUSED_WORDS = ("use-flash-attn", "attention-backend=flash", "attention-backend=fused", "transformer_engine", "nemo")
_HINT = "a CSV with a header such as model,device,n_devices,tp,pp,micro_batch,global_batch,seq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run as the cost model takes it.

    Attributes:
        memory_quantity: which peak the row is compared with, `allocated` or `device`.
        notes: what of the run is only approximated.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    layout: Layout
    stack: Stack
    n_devices: int
    memory_quantity: str = "allocated"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a row has no prediction.

    Attributes:
        status: `incomplete` or `invalid`.
        cause: in few words, the same for all rows that lack the same.
        reason: with the row's own values.
    """

    status: str
    cause: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable:
    """A run table: texts as they stood, and what each row was read to."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    runs: tuple[Run | Refusal, ...]

    def column(self, name: str) -> tuple[str, ...]:
        """The texts of a column, stripped; empty ones where there is no such column."""
        keys = _keys(self.header)
        if name not in keys:
            return ("",) * len(self.rows)
        return tuple(row[keys.index(name)].strip() for row in self.rows)

    @property
    def measured(self) -> tuple[str, ...]:
        """Columns that say how fast the runs were."""
        keys = _keys(self.header)
        return tuple(name for name in MEASURED_COLUMNS if name in keys and _PREDICTED.get(name) not in keys)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Columns that are neither read nor compared with, each once, in order."""
        used = {*READ_COLUMNS, *self.measured}
        names = (" ".join(name.split()) for name in self.header)
        return tuple(dict.fromkeys(name for name in names if name and name.lower() not in used))


def read_run_table(source: Path | str, defaults: Mapping[str, str] | None = None) -> RunTable:
    """Read a run table from a file (Path) or from its text (str).

    Args:
        defaults: what empty cells of a column are taken for, in rows that say nothing else; `device` is for rows whose
            `hardware` is empty too.
    """
    if isinstance(source, Path):
        return _parse(_file_text(source), str(source), defaults or {})
    return _parse(source, "the run table", defaults or {})


def read_row(values: dict[str, str]) -> Run | Refusal:
    """Read one row by lower-case column name."""
    try:
        return _run(Cells(values))
    except IncompleteRunError as error:
        return Refusal(status="incomplete", cause=error.cause, reason=error.reason)


def _file_text(path: Path) -> str:
    """The file's text with line ends as they are, since a quoted cell may hold some."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise TitanPlanError("C603", f"{path} is not UTF-8 text", _HINT) from error
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise TitanPlanError("C603", f"cannot read {path}: {what}", _HINT) from error


def _keys(header: tuple[str, ...]) -> list[str]:
    return [name.strip().lower() for name in header]


def _parse(text: str, origin: str, defaults: Mapping[str, str]) -> RunTable:
    if "\0" in text:
        raise TitanPlanError("C603", f"{origin} is not a text file: it holds a zero byte", _HINT)
    try:
        lines = [tuple(line) for line in csv.reader(io.StringIO(text, newline="")) if line]
    except csv.Error as error:
        raise TitanPlanError("C606", f"{origin} is not a CSV file: {error}", _HINT) from error
    if not lines:
        raise TitanPlanError("C606", f"{origin} is empty", _HINT)
    header, rows = lines[0], lines[1:]
    keys = _keys(header)
    _check_header(keys, origin)
    return RunTable(
        header=header,
        rows=tuple(_padded(row, len(keys)) for row in rows),
        runs=tuple(_read_line(keys, row, defaults) for row in rows),
    )


def _check_header(keys: list[str], origin: str) -> None:
    known = [key for key in keys if key in READ_COLUMNS]
    if not known:
        shown = ", ".join(keys)[:120]
        raise TitanPlanError("C606", f"{origin} has no column that evaluate reads; its first line is: {shown}", _HINT)
    twice = sorted({key for key in known if known.count(key) > 1})
    if twice:
        raise TitanPlanError("C606", f"{origin} has the column {twice[0]} twice", "each column once")


def _padded(row: tuple[str, ...], width: int) -> tuple[str, ...]:
    return (row + ("",) * width)[:width]


def _read_line(keys: list[str], row: tuple[str, ...], defaults: Mapping[str, str]) -> Run | Refusal:
    if len(row) > len(keys):
        reason = f"the row has {len(row)} cells, the header has {len(keys)}; quote cells that hold a comma"
        return Refusal(status="incomplete", cause="more cells than columns", reason=reason)
    pairs = zip(keys, row, strict=False)
    values = {key: value.strip() for key, value in pairs if key in READ_COLUMNS}
    given = {key: value for key, value in defaults.items() if key != "device" or not values.get("hardware")}
    return read_row(values | {key: value for key, value in given.items() if not values.get(key)})


def _run(cells: Cells) -> Run:
    cluster = _cluster(cells)
    degrees = degrees_of(cells)
    seq_len = cells.need("seq")
    batch = batch_of(cells, degrees.dp)
    model = model_of(cells, seq_len)
    stack = _stack(cells, cluster)
    layout, notes = layout_of(cells, degrees, batch, model, stack)
    precision, more_notes = _precision(cells, cluster)
    workload = Workload(
        seq_len=seq_len,
        global_batch=batch.whole,
        precision=precision,
        optimizer=cells.word("optimizer", tuple(OPTIMIZER_STATE_BYTES)) or "adamw",
        fused_attention=_is_fused(cells, cluster, stack, model, degrees.cp),
        dropout=not model.gated_mlp and stack.name.startswith("megatron"),
    )
    return Run(
        model=model,
        cluster=cluster,
        workload=workload,
        layout=layout,
        stack=stack,
        n_devices=degrees.n_devices,
        memory_quantity=_memory_quantity(cells),
        notes=notes + more_notes,
    )


def _cluster(cells: Cells) -> ClusterSpec:
    column = "device" if cells.text("device") else "hardware"
    if not cells.text(column):
        raise missing("device", "a name that `titan-plan clusters` lists")
    per_node = cells.whole("devices_per_node", at_most=_LARGEST_NODE)
    link = cells.number("inter_node_gb_per_s_per_device")
    try:
        return _cluster_with(cells.text(column), per_node, link)
    except TitanPlanError as error:
        reason = f"{column} {cells.text(column)[:60]!r}: {error.message}; {error.hint}"
        raise IncompleteRunError(f"{column} is not in the catalogue", reason) from error


@lru_cache(maxsize=256)
def _cluster_with(name: str, per_node: int | None, link_gb_per_s: float | None) -> ClusterSpec:
    cluster = find_cluster(name)
    if per_node and per_node != cluster.devices_per_node:
        cluster = cluster.with_devices_per_node(per_node)
    return cluster.with_inter_node_bandwidth(link_gb_per_s * 1e9) if link_gb_per_s else cluster


def _stack(cells: Cells, cluster: ClusterSpec) -> Stack:
    given = cells.word("stack", tuple(STACKS))
    if given:
        return STACKS[given]
    return STACKS[_inferred_stack(cells, ascend=cluster.device.vendor == "ascend")]


def _inferred_stack(cells: Cells, *, ascend: bool) -> str:
    sharding, notes = sharding_of(cells)[1], cells.text("notes").lower()
    said = f"{sharding} {cells.text('other_flags').lower()} {notes}"
    if "fsdp" in sharding or "fsdp" in cells.options:
        return "fsdp"
    if not ascend:
        return "megatron-deepspeed" if "deepspeed" in said else "megatron"
    if "parallel_optimizer" in said or "mindformers" in said:
        return "mindformers"
    fuses = {"use-mc2", "use-ascend-mc2"} & cells.options.keys() or "mc2 feature on" in notes
    return "mindspeed-mc2" if fuses else "mindspeed"


def _precision(cells: Cells, cluster: ClusterSpec) -> tuple[str, tuple[str, ...]]:
    text = cells.text("precision").lower()
    if not text:
        return cluster.device.default_precision, ()
    if "fp4" in text:
        return "fp8", ("fp4 is predicted at the fp8 rate",)
    for name, words in (
        ("fp8", ("fp8", "float8", "current scaling")),
        ("bf16", ("bf16", "bfloat16")),
        ("fp16", ("fp16", "float16", "half")),
        ("fp32", ("fp32", "float32", "tf32")),
    ):
        if any(word in text for word in words):
            return name, ()
    raise unreadable("precision", text, "bf16, fp16, fp32 or fp8 is known")


def _is_fused(cells: Cells, cluster: ClusterSpec, stack: Stack, model: ModelSpec, cp: int) -> bool:
    given = cells.flag("flash_attention")
    if given is not None:
        return given
    if stack.name == "titan":
        return True
    flags = cells.text("other_flags").lower()
    if cp == 1 and ("attention-backend=unfused" in flags or not cluster.device.has_precision("bf16")):
        return False
    if cp > 1 or any(word in flags for word in _FUSED_WORDS):
        return True
    return stack.name != "megatron-deepspeed" and (model.gated_mlp or stack.name != "megatron")


def _memory_quantity(cells: Cells) -> str:
    return cells.word("memory_quantity", MEMORY_QUANTITIES) or MEMORY_QUANTITIES[0]
