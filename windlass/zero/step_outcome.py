"""Outcome of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of a step.

    Attributes:
        norm: Norm of the full unclipped gradient, without the loss scale.
        applied: The parameters were updated, or their delayed update was started. If False, the gradient was not finite
            and is dropped.
        clip: Clipping factor of the gradient.
        flags: The `flags` that the caller passed to `step`, summed over ranks.
        bad: First parameter with a non-finite gradient; empty if there is none or the check did not run.
    """

    norm: float
    applied: bool
    clip: float
    flags: list[float]
    bad: str = ""
