"""A plan beside a dry run of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """One plan beside a dry run of the first rank of its fullest stage.

    Attributes:
        predicted_bytes, found_bytes: of live tensors at the peak; found 0 where the trainer does not run it.
        device_peak_bytes: what the dry run's tensors take on the device.
        problem: why the plan is not to be recommended; empty where it is.
    """

    plan: str
    rank: int
    predicted_bytes: int
    found_bytes: int
    device_peak_bytes: int
    problem: str
    seconds: float

    @property
    def difference(self) -> float:
        """Predicted over found, less 1; 0 where nothing was found."""
        return self.predicted_bytes / self.found_bytes - 1.0 if self.found_bytes else 0.0
