"""What other libraries complain about, in one short line of ours."""

from __future__ import annotations

from cost_models.yaml_numbers import cut


def reason(error: Exception) -> str:
    """The words of an error without line breaks, at most 160 characters; of a system error only what went wrong."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return cut(" ".join(text.split()), 160)
