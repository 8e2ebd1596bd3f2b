"""What a verification found: equal, or the first tensor that deviates, and by how much."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from windlass.verify.tensor_difference import Difference

PHASES = ("start", "forward", "gradient", "reduce", "clip", "update")


@dataclass(frozen=True)
class Deviation:
    """A tensor that differs by more than rounding.

    Attributes:
        step: counted from 1; 0 before the first.
        phase: one of `PHASES`.
        tensor: a parameter, a buffer, or the output of a module.
        module: path and class of the module that it belongs to.
        what: in which role it was looked at.
        rank: whose it is; None: of all.
        micro: which micro-batch of its rank, from 1; None: no single one.
        hint: what would explain it.
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
        """One whose figures are those of `apart`."""
        return cls(
            ulps=difference.ulps,
            relative=difference.relative,
            actual=difference.actual,
            expected=difference.expected,
            **facts,
        )


@dataclass
class StepResult:
    """One compared step. Of a copy that trains on its own, `alone_loss`, and `drift`: the 2-norm of all weights'
    distance from the sharded ones, over that of these.

    Losses are means over micro-batches; None where the loss is computed outside of the engine.

    `worst`: by phase the largest difference, as a share of what is allowed; `ulps`: in units in the last place.
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
        """Keep the largest difference of a phase."""
        self.worst_ratios[phase] = max(self.worst_ratios.get(phase, 0.0), difference.allowance_ratio)
        self.worst_ulps[phase] = max(self.worst_ulps.get(phase, 0.0), difference.ulps)


@dataclass
class VerificationReport:
    """What came of one verification on one number of ranks."""

    ranks: int
    stage: int
    dtypes: str = ""
    parameters: int = 0
    micro_batches: int = 1
    steps: list[StepResult] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)  # of one step, the first of them first
    tolerances: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether nothing deviated."""
        return not self.deviations

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `read` takes it."""
        return {**asdict(self), "equal": self.is_equal}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> VerificationReport:
        """From `as_json`."""
        given = {key: value for key, value in data.items() if key != "equal"}
        given["steps"] = [StepResult(**step) for step in data["steps"]]
        given["deviations"] = [Deviation(**one) for one in data["deviations"]]
        return cls(**given)
