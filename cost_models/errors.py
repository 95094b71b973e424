"""The one root of our errors: a stable code, what was got, and what would do."""

from __future__ import annotations


class TitanPlanError(Exception):
    """Bad input or a request that cannot be met.

    Args:
        code: stable code, a letter and three digits (`M101`, `C601`); `titan-plan explain CODE` tells the rule.
        message: names the thing and what was got.
        hint: what would be right; may be empty.
        exit_code: 2 for bad usage or input, 1 where no layout fits.
    """

    def __init__(self, code: str, message: str, hint: str = "", *, exit_code: int = 2) -> None:
        super().__init__(f"error[{code}]: {message}")
        self.code = code
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
