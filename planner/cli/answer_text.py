"""The answer in the terminal: what was asked, the best plans, the margins, why the rest lost, where the files are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cost_models.codes import find_code
from cost_models.prediction import host_budget_bytes, usable_bytes
from planner.cli.console import console
from planner.run_folder import rejections

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cost_models.plan import Plan
    from planner.answer import Answer

_GIB = float(2**30)
_STATES = ("weights", "gradients", "main_weights", "optimizer")


def print_answer(answer: Answer, files: dict[str, str], *, color: str = "auto") -> None:
    """Print the answer on stdout."""
    out = console(color)
    _asked(out, answer)
    if answer.plans:
        out.print()
        out.print(_table(answer.plans))
        out.print("tok/s/NPU = batch x sequence / step / NPUs; peak + room = device memory; fits: probability\n")
        _verified(out, answer)
        _margins(out, answer)
    else:
        _nothing_fits(out, answer)
    _why_not(out, answer)
    out.print(f"\nsaved  {files['folder']}/ ({', '.join(_names(files))})")
    if answer.plans:
        out.print("next   titan-plan evaluate RUNS.csv -o OUT.csv   compare with layouts that you ran")


def _asked(out: Console, answer: Answer) -> None:
    setting, result = answer.question.setting, answer.result
    cluster, workload = setting.cluster, setting.workload
    nodes = f"{cluster.n_nodes(setting.n_devices)} x {min(cluster.devices_per_node, setting.n_devices)}"
    out.print(
        f"{setting.model.name} ({setting.model.total_params / 1e9:.1f}B) on {setting.n_devices} NPUs "
        f"({cluster.name}: {nodes} {cluster.device.name}, {usable_bytes(setting) / _GIB:.1f} GiB each)"
    )
    out.print(
        f"sequence {workload.seq_len}, global batch {workload.global_batch}, {workload.precision}, {workload.optimizer}"
    )
    out.print(
        f"{result.layouts:,} layouts, all decided in {result.evaluate_s:.1f} s: {result.feasible:,} fit, "
        f"{sum(result.rejected.values()):,} rejected"
    )


def _table(plans: tuple[Plan, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("#", justify="right")
    table.add_column("plan", no_wrap=True, overflow="ignore")
    for head in ("step s", "10-90 %", "tok/s/NPU", "MFU %", "peak GiB", "room GiB", "fits %"):
        table.add_column(head, justify="right", no_wrap=True)
    for rank, plan in enumerate(plans, start=1):
        table.add_row(
            str(rank),
            plan.id,
            _seconds(plan.step_time_s),
            f"{_seconds(plan.step_time_low_s)}-{_seconds(plan.step_time_high_s)}",
            f"{plan.tokens_per_s_per_device:,.0f}",
            f"{100 * plan.mfu:.1f}",
            f"{plan.peak_bytes / _GIB:.1f}",
            f"{plan.headroom_bytes / _GIB:.1f}",
            f"{100 * plan.p_fits:.0f}",
        )
    return table


def _verified(out: Console, answer: Answer) -> None:
    """Dry runs of the trainer beside the predictions."""
    for one in answer.verified:
        if one.problem:
            out.print(f"dry run: {one.plan} is not recommended: {one.problem}", highlight=False)
        else:
            peak = f"{one.device_peak_bytes / _GIB:.1f} GiB on rank {one.rank}"
            off = f"its tensors were predicted to {100 * abs(one.difference):.2f} %"
            out.print(f"dry run: {one.plan} takes {peak}, {off}", highlight=False)
    if answer.verified and all(one.problem for one in answer.verified):
        out.print("none of the plans that were run dry can be recommended")
    if answer.verified:
        out.print()


def _margins(out: Console, answer: Answer) -> None:
    best, guide = answer.plans[0], answer.guide
    if len(answer.listed) > 1:
        second = answer.listed[1]
        out.print(f"best: {_faster(second, best)} than the runner-up {second.id}")
    else:
        out.print("best: the only one that fits")
    if guide.plan is None:
        out.print(f"the guide's layout (tp4 x pp4, ZeRO-2, full recompute) is not valid here: {guide.reason}")
    else:
        fits = "" if guide.plan.headroom_bytes >= answer.question.margin_bytes else ", which does not fit"
        out.print(
            f"      {_faster(guide.plan, best)} than the guide's layout {guide.plan.id} "
            f"({_seconds(guide.plan.step_time_s)} s, {guide.plan.peak_bytes / _GIB:.1f} GiB){fits}"
        )
    if best.host_bytes_per_node:
        budget = host_budget_bytes(answer.question.setting) / _GIB
        used = best.host_bytes_per_node / _GIB
        out.print(f"it swaps or offloads {used:,.0f} GiB to the host of each node, of {budget:,.0f} GiB allowed")
    for name, plan in (("roomiest", answer.roomiest), ("simplest", answer.simplest)):
        if plan and plan.id != best.id:
            slower = 100 * (plan.step_time_s / best.step_time_s - 1)
            out.print(f"{name} within 5 %: {plan.id}, {slower:.1f} % slower, {plan.headroom_bytes / _GIB:.1f} GiB room")
    if answer.days:
        told = f"{answer.days:,.1f} days, {answer.device_hours:,.0f} NPU-hours"
        out.print(f"{_tokens(answer.question.tokens)} tokens at this rate: {told}")
    fit = answer.question.setting.calibration
    out.print(f"constants: {fit.name}, +-{100 * fit.time_sigma:.0f} % (1 sigma), the band is meant to hold 80 %")
    if fit.caveat:
        out.print(f"           {fit.caveat}")


def _tokens(tokens: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:g}"


def _faster(other: Plan, best: Plan) -> str:
    ratio = other.step_time_s / best.step_time_s
    if ratio < 1.0005:
        return "no faster"
    return f"{100 * (ratio - 1):.1f} % faster" if ratio < 1.2 else f"{ratio:.2f}x faster"


def _nothing_fits(out: Console, answer: Answer) -> None:
    out.print("\nno layout fits")
    for near in answer.nearest:
        lacking = answer.question.margin_bytes - near.headroom_bytes
        most = sorted(near.memory_bytes.items(), key=lambda item: -item[1])[:3]
        told = ", ".join(f"{name} {n_bytes / _GIB:.1f}" for name, n_bytes in most)
        out.print(f"  {near.id}: lacks {lacking / _GIB:.2f} GiB on stage {near.worst_stage} (of its GiB: {told})")
    if answer.nearest:
        states = sum(answer.nearest[0].memory_bytes[name] for name in _STATES)
        moving = answer.nearest[0].memory_bytes["activations"] + answer.nearest[0].memory_bytes["transient"]
        shorter = " or a shorter --seq-len" if moving > states else ""
        out.print(f"hint: more NPUs, devices with more memory{shorter}; --fix and --max may rule out what would fit")
    else:
        out.print("hint: every layout breaks a rule; see the reasons below, or loosen --fix and --max")


def _why_not(out: Console, answer: Answer) -> None:
    if not answer.result.rejected:
        return
    out.print("\nwhy not the others")
    for rejection in rejections(answer):
        title = find_code(rejection.code).title
        out.print(f"  {rejection.code} {rejection.layouts:>13,}  {title}: e.g. {rejection.example}: {rejection.reason}")


def _names(files: dict[str, str]) -> list[str]:
    return [path.rsplit("/", 1)[-1] for kind, path in files.items() if kind != "folder"]


def _seconds(seconds: float) -> str:
    """Three digits, zeros at the end kept."""
    return f"{seconds:#.3g}".rstrip(".") if seconds < 1000 else f"{seconds:,.0f}"
