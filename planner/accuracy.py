"""Predicted against measured over a table of published runs, as a Markdown page.

    python -m planner.accuracy --measurements ../shared/measurements/measurements.csv -o docs/accuracy.md

The page names no path and no date: the same table and constants give the same page.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from cost_models.errors import TitanPlanError

from .accuracy_page import page_of
from .evaluate import EvaluatedTable, evaluate_runs

# Tables whose memory is what the device reports (nvidia-smi, npu-smi), not what torch's allocator does.
DEVICE_MEMORY_SOURCES = frozenset({"bigscience-tr11", "bigscience-v100", "dlperf-oneflow"})
