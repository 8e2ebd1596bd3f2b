"""Result of a verification: equal, or the first tensors that deviate and by how much."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from windlass.verify.tensor_difference import Difference

PHASES = ("start", "forward", "gradient", "reduce", "clip", "update")


@dataclass(frozen=True)
class Deviation:
    """Tensor that differs by more than rounding.

    Attributes:
        step: number of the step from 1; 0: before the first.
        phase: one of `PHASES`.
        tensor: name of a parameter or buffer, or the output of a module.
        module: path and class of the tensor's module.
        role: kind of value that was compared, e.g. "weight after the step".
        ulps, relative, actual, expected: see `Difference`.
        allowed: the allowed difference in words.
        rank: rank of the tensor; None: the comparison covers all ranks.
        micro: number of the micro-batch on this rank, from 1; None: the comparison covers all micro-batches.
        hint: possible explanation.
    """

    step: int
    phase: str
    tensor: str
    module: str
    role: str
    ulps: float
    relative: float
    actual: float
    expected: float
    allowed: str
    rank: int | None = None
    micro: int | None = None
    hint: str = ""

    @classmethod
    def from_difference(cls, difference: Difference, **facts: Any) -> Deviation:
        """Make a deviation with the figures of `difference`."""
        return cls(
            ulps=difference.ulps,
            relative=difference.relative,
            actual=difference.actual,
            expected=difference.expected,
            **facts,
        )


@dataclass
class StepResult:
    """Result of one compared step.

    Attributes:
        step: number of the step, from 1.
        loss: mean over micro-batches; None if neither the model returns it nor `engine.backward` gets it.
        plain_loss: mean over micro-batches; None if the loss is computed outside the model.
        applied: False if the step was skipped.
        independent_loss: mean loss of the independent run, i.e. of a second plain copy of the model.
        drift: 2-norm of the distance of the independent run's weights from the sharded weights, over the norm of the
            sharded weights.
        worst_ratios: largest ratio of a difference to its allowed size, by phase.
        worst_ulps: largest difference in units in the last place, by phase.
    """

    step: int
    loss: float | None = None
    plain_loss: float | None = None
    applied: bool = True
    independent_loss: float | None = None
    drift: float | None = None
    worst_ratios: dict[str, float] = field(default_factory=dict)
    worst_ulps: dict[str, float] = field(default_factory=dict)

    def record_difference(self, phase: str, difference: Difference) -> None:
        """Update the largest differences of a phase."""
        self.worst_ratios[phase] = max(self.worst_ratios.get(phase, 0.0), difference.allowance_ratio)
        self.worst_ulps[phase] = max(self.worst_ulps.get(phase, 0.0), difference.ulps)


@dataclass
class VerificationReport:
    """Result of one verification on one number of ranks."""

    ranks: int
    stage: int
    dtypes: str = ""
    parameters: int = 0
    micro_batches: int = 1
    steps: list[StepResult] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)  # deviations of the first step that has some, by phase
    tolerances: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """True if nothing deviated."""
        return not self.deviations

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `from_dict`."""
        return {**asdict(self), "equal": self.is_equal}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> VerificationReport:
        """Restore a report from `to_dict`."""
        given = {key: value for key, value in data.items() if key != "equal"}
        given["steps"] = [StepResult(**step) for step in data["steps"]]
        given["deviations"] = [Deviation(**one) for one in data["deviations"]]
        return cls(**given)
