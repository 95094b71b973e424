"""The run folder: config.yaml and launch.sh of the best plan, and the tables; each file whole or not at all."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cost_models.codes import find_code
from cost_models.errors import TitanPlanError
from cost_models.plan import plans_of
from cost_models.prediction import host_budget_bytes
from cost_models.rules import violation
from cost_models.whole_files import write_whole
from planner.answer_json import answer_object, inputs_object, tool_name
from planner.search import M_DEVICE, M_HOST
from reports.plan_tables import Rejection, plans_csv, rejected_csv
from runtime.config import CommunicationOptions, PlanSummary, TrainConfig, config_text
from runtime.launch_script import launch_script

if TYPE_CHECKING:
    from cost_models.layout import Layout
    from cost_models.plan import Plan
    from planner.answer import Answer

_GIB = float(2**30)


def default_folder(answer: Answer) -> Path:
    """`titan_runs/<month day>-<model>-<devices>` in the working folder, numbered where it exists."""
    setting = answer.question.setting
    base = Path("titan_runs") / f"{datetime.now():%m%d}-{_safe(setting.model.name)}-{setting.n_devices}"
    folder, number = base, 2
    while folder.exists():
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    return folder


def check_folder(folder: Path) -> None:
    """Refuse, before the search, a place where no folder can be."""
    try:
        if folder.is_symlink() and not folder.exists():
            raise TitanPlanError("C603", f"--out {folder} is a link to nothing", "name a folder")
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    except OSError as error:  # a name longer than a path may be; a parent that may not be read
        raise TitanPlanError("C603", f"--out {str(folder)[:80]}: {error.strerror}", "name another folder") from error
    if not existing.is_dir():
        raise TitanPlanError("C603", f"--out {folder}: {existing} is a file", "name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise TitanPlanError("C603", f"--out {folder}: no permission to write in {existing}", "name another folder")


def write_run(answer: Answer, folder: Path) -> dict[str, str]:
    """Write the files; returns their paths by kind. An older file of the same name is replaced."""
    files = {"folder": str(folder)}
    texts = {"plans": plans_csv(answer.listed, answer.question.setting.calibration.name)}
    texts["rejected"] = rejected_csv(rejections(answer))
    names = {"plans": "plans.csv", "rejected": "rejected.csv", "report": "report.json"}
    if answer.plans:
        names |= {"config": "config.yaml", "launch": "launch.sh"}
        config = best_config(answer)
        texts |= {"config": config_text(config), "launch": launch_script(config, answer.question.setting.cluster)}
    files |= {kind: str(folder / name) for kind, name in names.items()}
    texts["report"] = json.dumps(answer_object(answer, files), indent=2, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole({folder / name: texts[kind] for kind, name in names.items()})
        if not answer.plans:
            # Those of an earlier search in this folder would pass for this one's.
            for name in ("config.yaml", "launch.sh"):
                (folder / name).unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise TitanPlanError("C603", f"cannot write {folder}: {what}", "name another folder with --out") from error
    return files


def best_config(answer: Answer) -> TrainConfig:
    """The best plan as what the trainer reads."""
    question, plan = answer.question, answer.plans[0]
    return TrainConfig(
        model=question.setting.model,
        workload=question.setting.workload,
        layout=plan.layout,
        communication=CommunicationOptions(comm_algorithm=question.setting.algorithm),
        cluster=question.setting.cluster.name,
        plan=_summary(plan, answer),
    )


def rejections(answer: Answer) -> list[Rejection]:
    """What ruled layouts out, most frequent first, with an example each."""
    result = answer.result
    return [
        Rejection(
            code=code,
            title=find_code(code).title,
            layouts=count,
            example=result.examples[code].name,
            reason=_reason(answer, code, result.examples[code]),
        )
        for code, count in sorted(result.rejected.items(), key=lambda item: -item[1])
    ]


def _reason(answer: Answer, code: str, layout: Layout) -> str:
    setting = answer.question.setting
    if code not in {M_DEVICE, M_HOST}:
        broken = violation(setting, layout)
        return broken.reason if broken else ""
    plan = plans_of(setting, [layout])[0]
    if code == M_HOST:
        budget = host_budget_bytes(setting) / _GIB
        return f"{plan.host_bytes_per_node / _GIB:.1f} GiB swapped and offloaded a node, {budget:.1f} GiB are allowed"
    usable = (plan.peak_bytes + plan.headroom_bytes - answer.question.margin_bytes) / _GIB
    return f"stage {plan.worst_stage} needs {plan.peak_bytes / _GIB:.1f} GiB of {usable:.1f} GiB"


def _summary(plan: Plan, answer: Answer) -> PlanSummary:
    inputs = {
        key: str(value) for key, value in inputs_object(answer.question).items() if key != "calibration_provenance"
    }
    return PlanSummary(
        version=tool_name(),
        layout=plan.id,
        inputs=inputs,
        step_time_s=plan.step_time_s,
        step_time_low_s=plan.step_time_low_s,
        step_time_high_s=plan.step_time_high_s,
        tokens_per_s_per_device=plan.tokens_per_s_per_device,
        mfu=plan.mfu,
        hfu=plan.hfu,
        peak_bytes=plan.peak_bytes,
        headroom_bytes=plan.headroom_bytes,
        host_bytes_per_node=plan.host_bytes_per_node,
        p_fits=plan.p_fits,
        worst_stage=plan.worst_stage,
        memory_bytes=plan.memory_bytes,
        time_s=plan.time_s,
        communication_s=plan.communication_s,
        computing_s=plan.computing_s,
    )


def _safe(name: str) -> str:
    """A name that is one part of a path."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name).strip(".") or "model"
