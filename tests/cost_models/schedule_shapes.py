"""Shapes of small pipelines that a schedule takes."""

from __future__ import annotations

import numpy as np

from cost_models.schedules import SCHEDULES, schedule_code, schedule_valid


def is_valid(name: str, pp: int, vpp: int, micro_batches: int) -> bool:
    return bool(schedule_valid(*(np.array(value) for value in (schedule_code(name), pp, vpp, micro_batches))).item())


SHAPES = {
    name: [
        (pp, vpp, micro_batches)
        for pp in range(1, 7)
        for vpp in range(1, 5)
        for micro_batches in range(1, 25)
        if is_valid(name, pp, vpp, micro_batches)
    ]
    for name in SCHEDULES
}
"""By schedule: pp, vpp, micro batches."""
