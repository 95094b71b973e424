"""Losses of the tiny models as transformers computes them; `python -m tests.runtime.hf.golden` writes the file anew.

transformers is no dependency: install it beside the project (`pip install --target FOLDER transformers`, PYTHONPATH).
The file was made with transformers 5.24.0 and torch 2.13.0 on a CPU, in full precision, with eager attention.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.runtime.hf.folders import CONFIGS, sequences, write_folder

GOLDEN = Path(__file__).with_name("golden_losses.json")


def transformers_loss(folder: Path, name: str) -> float:
    """Mean token loss of the folder's model on `sequences`; every weight must have been found."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert type(model).__name__ == CONFIGS[name]["architectures"][0]
    wrong = {key: value for key, value in report.items() if value}
    assert not wrong, wrong
    tokens = torch.from_numpy(sequences(CONFIGS[name]))
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), tokens[:, 1:].flatten()).item()


def main() -> None:
    """Write the losses of all models."""
    found = {}
    for name in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = transformers_loss(write_folder(Path(folder), name), name)
    GOLDEN.write_text(json.dumps(found, indent=2) + "\n")
    sys.stderr.write(f"{GOLDEN}\n")


if __name__ == "__main__":
    main()
