"""The answer as the JSON object that programs may rely on (`schema: 1`)."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from cost_models.prediction import usable_bytes

if TYPE_CHECKING:
    from cost_models.layout import Layout
    from cost_models.plan import Plan
    from planner.answer import Answer
    from planner.question import Question

SCHEMA = 1


def tool_name() -> str:
    """Name and version of this program."""
    return f"titan-plan {version('titan-plan')}"


def answer_object(answer: Answer, files: dict[str, str]) -> dict[str, Any]:
    """The whole answer; additions to its keys are free, changes are not."""
    result = answer.result
    return {
        "schema": SCHEMA,
        "tool": tool_name(),
        "inputs": inputs_object(answer.question),
        "searched": {
            "layouts": result.layouts,
            "feasible": result.feasible,
            "complete": True,
            "evaluate_s": result.evaluate_s,
            "timed": result.timed,
            "layer_choices": result.layer_choices,
        },
        "plans": [plan_object(plan) for plan in answer.plans],
        "roomiest": answer.roomiest.id if answer.roomiest else None,
        "simplest": answer.simplest.id if answer.simplest else None,
        "front": [_point(plan) for plan in answer.front],
        "margin": margin_object(answer),
        "training": training_object(answer),
        "rejected": result.rejected,
        "nearest": [
            {**plan_object(plan), "lacking_bytes": answer.question.margin_bytes - plan.headroom_bytes}
            for plan in answer.nearest
        ],
        "verified": [{**asdict(one), "difference": one.difference} for one in answer.verified],
        "files": files,
    }


def training_object(answer: Answer) -> dict[str, float] | None:
    """What training on the tokens asked for takes; None where none were, or where nothing fits."""
    if not answer.days:
        return None
    return {"tokens": answer.question.tokens, "days": answer.days, "device_hours": answer.device_hours}


def inputs_object(question: Question) -> dict[str, Any]:
    """What was asked, defaults filled in."""
    setting = question.setting
    fixed, most = question.bounds.words()
    return {
        "model": setting.model.name,
        "parameters": setting.model.total_params,
        "npus": setting.n_devices,
        "cluster": setting.cluster.name,
        "device": setting.cluster.device.name,
        "devices_per_node": setting.cluster.devices_per_node,
        "device_memory_bytes": usable_bytes(setting),
        "seq_len": setting.workload.seq_len,
        "global_batch": setting.workload.global_batch,
        "precision": setting.workload.precision,
        "optimizer": setting.workload.optimizer,
        "hbm_margin_bytes": question.margin_bytes,
        "fix": fixed,
        "max": most,
        "comm_algorithm": setting.algorithm,
        "stack": setting.stack.name,
        "calibration": setting.calibration.name,
        "calibration_provenance": setting.calibration.provenance,
    }


def plan_object(plan: Plan) -> dict[str, Any]:
    """One plan."""
    values = asdict(plan)
    del values["layout"]
    return {"id": plan.id, "layout": layout_object(plan.layout), **values}


def layout_object(layout: Layout) -> dict[str, Any]:
    """One layout; `recompute` in one text, as the config file writes it."""
    values = asdict(layout)
    del values["recompute_layers"]
    return {**values, "recompute": layout.recompute_text}


def margin_object(answer: Answer) -> dict[str, Any]:
    """By which factor the best beats the runner-up and the users' guide's layout; None where there is none."""
    best = answer.plans[0].step_time_s if answer.plans else None
    runner_up = answer.listed[1] if len(answer.listed) > 1 else None
    guide = answer.guide.plan
    return {
        "runner_up": runner_up.id if runner_up else None,
        "over_runner_up": runner_up.step_time_s / best if runner_up and best else None,
        "guide": plan_object(guide) if guide else None,
        "guide_reason": answer.guide.reason,
        "guide_fits": guide.headroom_bytes >= answer.question.margin_bytes if guide else None,
        "over_guide": guide.step_time_s / best if guide and best else None,
    }


def _point(plan: Plan) -> dict[str, Any]:
    return {"id": plan.id, "step_time_s": plan.step_time_s, "headroom_bytes": plan.headroom_bytes}
