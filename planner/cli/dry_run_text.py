"""A dry run in the terminal: memory, the peak, work and messages, predicted and found side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.cli.console import console
from planner.dry_compare import TENSORS, TRANSIENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from planner.dry_compare import DryComparison
    from runtime.config_values import TrainConfig

_GIB, _MIB = 2**30, 2**20


def print_comparisons(config: TrainConfig, compared: Sequence[DryComparison], *, chosen: bool) -> None:
    """Print all ranks on stdout, the one with the highest peak in full; `chosen`: the user named the rank."""
    out, worst = console(), max(compared, key=lambda one: one.found.peak_bytes)
    layout, cluster = config.layout, config.cluster or "no cluster named"
    out.print(f"{config.model.name} on {layout.devices} devices ({cluster}), {layout.name}")
    if len(compared) > 1:
        out.print()
        out.print(_stages(compared))
    why = "" if chosen else ", the worst" if len(compared) > 1 else ", the worst by prediction"
    out.print(
        f"\nrank {worst.rank} of {layout.devices}, pipeline stage {worst.stage} of {layout.pp}{why}: "
        f"one step without hardware in {worst.run.seconds:.1f} s{_shortened(worst, layout.accumulation)}\n"
    )
    out.print(_memory(worst))
    _outside(out, worst)
    out.print(f"\npeak in {worst.run.moment}; the largest tensors then")
    out.print(_largest(worst))
    out.print()
    out.print(_work(worst))
    if worst.found.traffic or worst.predicted.traffic:
        out.print()
        out.print(_traffic(worst))
    _verdict(out, compared)


def _shortened(one: DryComparison, accumulation: int) -> str:
    counts = one.micro_batches
    return f", from {counts[0]} and {counts[1]} of its {accumulation} micro batches" if len(counts) == 2 else ""


def _table(*heads: str, left: int = 1) -> Table:
    """The first columns to the left, numbers to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(heads):
        if number < left:
            table.add_column(head, no_wrap=True, overflow="ignore")
        else:
            table.add_column(head, justify="right", no_wrap=True)
    return table


def _unit(most_bytes: int) -> tuple[int, str]:
    """Tiny models are told in MiB."""
    return (_GIB, "GiB") if most_bytes >= _GIB else (_MIB, "MiB")


def _stages(compared: Sequence[DryComparison]) -> Table:
    size, unit = _unit(max(one.found.peak_bytes for one in compared))
    table = _table("stage", "rank", f"predicted {unit}", "dry run", "difference", left=0)
    for one in compared:
        table.add_row(str(one.stage), str(one.rank), *_sizes(one.predicted.peak_bytes, one.found.peak_bytes, size))
    return table


def _memory(one: DryComparison) -> Table:
    size, unit = _unit(one.found.peak_bytes)
    table = _table("memory", f"predicted {unit}", "dry run", "difference")
    predicted, found = one.predicted.memory_bytes, one.found.memory_bytes
    for name in TENSORS:
        if predicted[name] or found[name]:
            table.add_row(name, *_sizes(predicted[name], found[name], size))
        if name == "transient":
            parts = {part: one.run.memory_bytes[part] for part in TRANSIENT}
            for part, n_bytes in parts.items():
                if n_bytes:
                    table.add_row(f"  {part}", "", f"{n_bytes / size:,.2f}", "")
    table.add_row("peak of live tensors", *_sizes(one.predicted.peak_bytes, one.found.peak_bytes, size))
    return table


def _sizes(predicted: int, found: int, size: int) -> tuple[str, str, str]:
    return f"{predicted / size:,.2f}", f"{found / size:,.2f}", _difference(predicted, found)


def _difference(predicted: float, found: float) -> str:
    if predicted == found:
        return "equal"
    if not found:
        return "only predicted"
    if not predicted:
        return "not predicted"
    told = f"{100 * (predicted / found - 1):+.2f} %"
    return "under 0.01 %" if told[1:] == "0.00 %" else told


def _outside(out: Console, one: DryComparison) -> None:
    """What a device holds that is no tensor of a dry run."""
    room = one.room
    if not room.known:
        return
    peak, tensors = one.device_peak_bytes, one.found.peak_bytes + room.statistics_bytes
    runtime = peak - tensors - room.communication_bytes
    kernel = f", softmax statistics of its attention kernel {room.statistics_bytes / _GIB:.2f}"
    out.print(
        f"not in it: communication buffers {room.communication_bytes / _GIB:.2f} GiB, runtime context and "
        f"fragmentation {runtime / _GIB:.2f}{kernel if room.statistics_bytes else ''}"
    )
    out.print(f"on the device: {peak / _GIB:.2f} of {room.usable_bytes / _GIB:.2f} GiB")


def _largest(one: DryComparison) -> Table:
    size, unit = _unit(one.found.peak_bytes)
    table = _table("category", "shape", "dtype", "module", "made in", unit, left=5)
    for tensor in one.run.largest:
        shape = " x ".join(str(n) for n in tensor.shape) or "-"
        module = tensor.module or "-"
        table.add_row(
            tensor.category,
            shape,
            tensor.dtype,
            module,
            tensor.moment,
            f"{tensor.n_bytes / size:,.3f}",
        )
    return table


def _work(one: DryComparison) -> Table:
    size, unit = _unit(one.found.peak_bytes)
    predicted, found = one.predicted, one.found
    table = _table("of the step", "predicted", "dry run", "difference")
    flops = (predicted.flops, found.flops)
    table.add_row("FLOPs", *(f"{number:.4g}" for number in flops), _difference(*flops))
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "host_bytes"):
        pair = getattr(predicted, name), getattr(found, name)
        if any(pair):
            table.add_row(f"{name.removesuffix('_bytes')} {unit}", *_sizes(*pair, size))
    return table


def _traffic(one: DryComparison) -> Table:
    """By group and kind; the two agree, or the row says by how much they do not."""
    size, unit = _unit(max(t.n_bytes for t in (*one.predicted.traffic, *one.found.traffic)))
    table = _table(
        "messages", "kind", "ranks", "predicted", "dry run", f"predicted {unit}", "dry run", "difference", left=2
    )
    predicted = {(t.ranks, t.kind): t for t in one.predicted.traffic}
    found = {(t.ranks, t.kind): t for t in one.found.traffic}
    for key in sorted(predicted.keys() | found.keys(), key=lambda key: ((predicted | found)[key].names, key[1])):
        sides = [side.get(key) for side in (predicted, found)]
        counts = [t.count if t else 0 for t in sides]
        sizes = [t.n_bytes if t else 0 for t in sides]
        names = ", ".join(sorted({name for t in sides if t for name in t.names}))
        other = "other counts" if sizes[0] == sizes[1] and counts[0] != counts[1] else _difference(*sizes)
        told = [f"{n:,}" for n in counts] + [f"{n / size:,.3f}" for n in sizes]
        table.add_row(names, key[1], f"{len(key[0]):,}", *told, other)
    return table


def _verdict(out: Console, compared: Sequence[DryComparison]) -> None:
    problems = [problem for one in compared for problem in one.problems()]
    out.print()
    for problem in problems:
        out.print(problem)
    if not problems:
        room = compared[0].room
        fits = "it fits" if room.known else "whether it fits is not known"
        out.print(f"{fits}; prediction and trainer agree within {100 * max(abs(o.difference) for o in compared):.2f} %")
