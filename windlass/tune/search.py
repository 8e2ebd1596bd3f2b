"""Order of trials by a model of their cost, which each measurement corrects.

[Note: search of configurations] The first trial measures the inputs of the predictions. Predictions, corrected by the
measurements so far, choose each following trial ([Note: choice of trials]). The search ends when the budget of trials
or of time is spent, or when no trial promises a gain and the best one's neighbours have all been measured, except those
that cannot fit in memory. So a wrong prediction mainly costs trials, and a stopped search returns its best
configuration so far.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.config.batch_sizes import MICRO
from windlass.tune.search_space import CHECKPOINTING, PARAMETERS_TIER, STAGE, STATES_TIER, Candidate
from windlass.tune.trial_choice import NEGLIGIBLE, TrialChoice
from windlass.tune.trial_record import TrialRecord


@dataclass
class SearchState:
    """Trials so far.

    Attributes:
        metric: DeepSpeed's name of the optimized metric.
        records: Records by candidate, in the order of the trials.
        budget: Number of trials that may be run.
    """

    metric: str = "throughput"
    budget: int = 50
    records: dict[Candidate, TrialRecord] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        """Number of trials that were run."""
        return sum(record.ran for record in self.records.values())

    @property
    def seconds(self) -> float:
        """Duration of all trials, in seconds."""
        return sum(record.seconds for record in self.records.values())

    def is_spent(self) -> bool:
        """Return True if no further trial may be run."""
        return self.runs >= self.budget

    def best(self) -> TrialRecord | None:
        """Return the best measured trial; None: there is none."""
        counted = [record for record in self.records.values() if record.counts]
        return max(counted, key=lambda record: record.score(self.metric), default=None)

    def tried_since_best(self) -> int:
        """Return the number of trials after the best one; 0 if there is none."""
        best = self.best()
        ran = [record for record in self.records.values() if record.ran]
        return len(ran) - 1 - ran.index(best) if best is not None else 0


Measure = Callable[[Candidate], TrialRecord]
"""Function that runs or discards a candidate's trial, adds its record to the state, and returns the record."""


def search_by_model(
    choice: TrialChoice,
    state: SearchState,
    measure_all: Callable[[Sequence[Candidate]], None],
    *,
    width: int = 1,
    early_stopping: int | None = None,
    share: float | None = None,
    fewest: int = 1,
) -> None:
    """Run the trials that `choice` selects, see [Note: search of configurations].

    Args:
        measure_all: Function that runs or discards candidates, and adds their records to the state.
        width: Number of trials that run at the same time.
        early_stopping: Number of trials without a gain that end the search; None: no such limit.
        share: Time limit of the search, as a share of the time that all candidates would take; None: no limit.
        fewest: Number of trials that are run even beyond the time limit.
    """
    while not state.is_spent():
        chosen = choice.several(state.records, min(width, state.budget - state.runs))
        best = state.best()
        if best is not None:
            if all(one.gain < NEGLIGIBLE for one in chosen):
                return
            if early_stopping is not None and state.tried_since_best() >= early_stopping:
                return
            if share is not None and state.runs >= fewest:
                left = share * choice.exhaustive_seconds(state.records) - state.seconds
                chosen = [one for one in chosen if one.seconds <= left]
        if not chosen:
            return
        measure_all([one.candidate for one in chosen])


def memory_order(candidate: Candidate) -> tuple[Any, ...]:
    """Return a sort key: candidates that need less memory come first."""
    offloaded = sum(candidate.get(key, "none") != "none" for key in (STATES_TIER, PARAMETERS_TIER))
    return candidate.get(MICRO, 1), -candidate.get(STAGE, 0), not candidate.get(CHECKPOINTING, False), -offloaded


def try_in_order(
    ranked: list[Candidate],
    state: SearchState,
    measure_all: Callable[[Sequence[Candidate]], None],
    *,
    width: int = 1,
    early_stopping: int | None,
    seed: int | None = None,
) -> None:
    """Try candidates in order, like DeepSpeed's tuner `gridsearch`; with a seed in random order, like its `random`.

    Args:
        measure_all: Function that runs or discards candidates, and adds their records to the state.
        width: Number of trials that run at the same time.
        early_stopping: Number of trials without a gain that end the search; None: no such limit.
        seed: Seed of a random order; None: the order of `ranked`.
    """
    ordered = list(ranked)
    if seed is not None:
        random.Random(seed).shuffle(ordered)
    waiting = [candidate for candidate in ordered if candidate not in state.records]
    while waiting and not state.is_spent():
        if early_stopping and state.tried_since_best() >= early_stopping:
            return
        count = min(width, state.budget - state.runs)
        measure_all(waiting[:count])
        del waiting[:count]
