"""Our trainer, whose steps wait for their turn; arguments are those of `runtime.train`."""

from __future__ import annotations

import sys

from benchmarks.turns import taking_turns
from runtime.engine import Engine
from runtime.train import main

if __name__ == "__main__":
    Engine.step = taking_turns(Engine.step)  # type: ignore[method-assign]
    sys.exit(main())
