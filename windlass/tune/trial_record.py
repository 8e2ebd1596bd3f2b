"""Result of one trial: plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from windlass.tune.search_space import Candidate


class TrialStatus(StrEnum):
    """Outcome of a trial."""

    MEASURED = "measured"
    SLOW = "slow"  # measured, and ended after two steps because it was much slower than the best
    OVER = "over the limit"  # measured, and its memory exceeds the limit
    MEMORY = "out of memory"
    FAILED = "failed"
    DISCARDED = "discarded"  # not run: it would not fit (predicted), or the model cannot checkpoint activations


@dataclass(frozen=True)
class TrialRecord:
    """Trial of one candidate.

    Attributes:
        measured: Measurements that the engine wrote; empty if it wrote none.
        error: Error of the program, or the reason why the trial does not count.
        left_behind: Command lines of processes that the program left behind, which were ended.
        seconds: Duration of all runs of the trial.
        predicted_bytes: Predicted peak of the limited memory of a rank; None: there is no prediction.
        estimate_s: Predicted seconds of a step; None: there is no prediction.
        repeats: Number of runs that `measured` combines.
    """

    candidate: Candidate
    status: TrialStatus
    measured: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    left_behind: tuple[str, ...] = ()
    seconds: float = 0.0
    predicted_bytes: int | None = None
    estimate_s: float | None = None
    repeats: int = 1

    @property
    def counts(self) -> bool:
        """True if the trial was measured and may be the best."""
        return self.status in (TrialStatus.MEASURED, TrialStatus.SLOW)

    @property
    def ran(self) -> bool:
        """True if the trial was run."""
        return self.status is not TrialStatus.DISCARDED

    @property
    def step_s(self) -> float:
        """Median time of a step, in seconds."""
        return float(self.measured["step_s"])

    @property
    def throughput(self) -> float:
        """Samples per second, over all ranks."""
        return float(self.measured["train_batch"]) / self.step_s

    def score(self, metric: str) -> float:
        """Return the value of DeepSpeed's `autotuning.metric`; larger is better."""
        if metric == "latency":
            return -self.step_s
        if metric == "forward":
            return -float(self.measured["forward_s"])
        if metric == "step":
            return -float(self.measured["update_s"])
        return self.throughput  # for "flops" too: every configuration has the same flops per sample

    def as_json(self) -> dict[str, Any]:
        """Return the trial as plain data."""
        row = {key: value for key, value in asdict(self).items() if key != "candidate"}
        row["status"] = str(self.status)
        row["left_behind"] = list(self.left_behind)
        return {"name": self.candidate.name, "values": self.candidate.overrides, **row}
