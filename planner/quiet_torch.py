"""torch as a dry run wants it: without a device's plugin, and without its warnings."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Import and run torch in here.

    It would load torch_npu by itself, and a broken one would break `import torch`; that stays so in this process and
    its children. Its warnings are about features that the run needs and the user did not choose.
    """
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
