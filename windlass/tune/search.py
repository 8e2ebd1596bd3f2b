"""Order of trials: from the best estimate, one key at a time, as far as measured times fall.

[Note: search of configurations] The first trials are the user's own configuration, which also gives the facts that the
estimate needs, and the best candidate by the estimate. Each key is then changed alone, starting at the best measured
configuration, the nearest values first, and a direction is left once it is slower. A full round without a gain ends the
walk. What is left of the budget goes to the best estimates that were not tried. So a wrong estimate costs trials, not
the result, and a search that is stopped has its best so far.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.config.batch_sizes import MICRO
from windlass.tune.search_space import (
    CHECKPOINTING,
    ORDERED_KEYS,
    PARAMETERS_TIER,
    STAGE,
    STATES_TIER,
    Candidate,
    SearchSpace,
)
from windlass.tune.trial_record import TrialRecord, TrialStatus

_CLEARLY = 0.02  # a relative difference below this is noise, and no reason to leave a direction


@dataclass
class SearchState:
    """Trials so far.

    Attributes:
        metric: DeepSpeed's name of what is optimized.
        records: Records by candidate, in the order of the trials.
        budget: Number of trials that may be run.
    """

    metric: str = "throughput"
    budget: int = 50
    records: dict[Candidate, TrialRecord] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        """Number of trials that were run."""
        return sum(record.status != TrialStatus.DISCARDED for record in self.records.values())

    def is_spent(self) -> bool:
        """True if no more trial may be run."""
        return self.runs >= self.budget

    def best(self) -> TrialRecord | None:
        """Return the best measured trial; None: there is none."""
        counted = [record for record in self.records.values() if record.counts]
        return max(counted, key=lambda record: record.score(self.metric), default=None)

    def tried_since_best(self) -> int:
        """Return the number of trials after the best one."""
        best = self.best()
        ran = [record for record in self.records.values() if record.status != TrialStatus.DISCARDED]
        return len(ran) - 1 - ran.index(best) if best is not None else 0


Measure = Callable[[Candidate], TrialRecord]
"""Runs the trial of a candidate, or discards it; the record is in the state when it returns."""


def walk(
    space: SearchSpace,
    ranked: list[Candidate],
    state: SearchState,
    measure: Measure,
    *,
    early_stopping: int | None = None,
) -> None:
    """Search, see [Note: search of configurations].

    Args:
        ranked: Candidates that may be tried, the best estimate first.
        early_stopping: Number of trials without a gain after which the search ends, once the walk is over.
    """
    allowed = set(ranked)
    smallest = min(ranked, key=memory_order)
    for candidate in [ranked[0], smallest, *ranked[1:]]:  # until one runs
        if state.is_spent() or (state.records.get(candidate) or measure(candidate)).counts:
            break
    improved = True
    while improved and not state.is_spent():
        improved = False
        for dimension in space.dimensions:
            gained = _change_one(space, dimension.key, allowed, state, measure)
            improved = improved or gained
            if state.is_spent():
                return
    patience = early_stopping if early_stopping is not None else 3
    failed = 0
    for candidate in ranked:
        if state.is_spent() or failed >= patience:
            return
        if candidate in state.records:
            continue
        before = state.best()
        if measure(candidate).status is not TrialStatus.DISCARDED:
            failed = failed + 1 if state.best() is before else 0


def _change_one(space: SearchSpace, key: str, allowed: set[Candidate], state: SearchState, measure: Measure) -> bool:
    """Change one key of the best configuration. Return True if that made it faster."""
    dimension = next(one for one in space.dimensions if one.key == key)
    start = state.best()
    if start is None:
        return False
    is_ordered = key in ORDERED_KEYS
    closed: set[bool] = set()  # directions that were slower
    for candidate in space.neighbours(start.candidate, dimension):
        if state.is_spent():
            break
        if candidate not in allowed:
            continue
        up = _is_above(candidate, start.candidate, key)
        if is_ordered and up in closed:
            continue
        record = state.records.get(candidate) or measure(candidate)
        best = state.best()
        assert best is not None
        if not record.counts:
            if record.status in (TrialStatus.MEMORY, TrialStatus.OVER, TrialStatus.DISCARDED):
                closed.add(up)
        elif record.score(state.metric) < start.score(state.metric) - _CLEARLY * abs(start.score(state.metric)):
            closed.add(up)
    return state.best() is not start


def search_in_rounds(
    space: SearchSpace,
    ranked: list[Candidate],
    state: SearchState,
    measure_all: Callable[[Sequence[Candidate]], None],
    *,
    width: int,
    early_stopping: int | None = None,
) -> None:
    """Search in rounds of `width` trials that run at the same time.

    A round has the neighbours of the best measured configuration in one key, and then the best estimates. Once all
    neighbours are measured, rounds without a gain end the search.

    Args:
        ranked: Candidates that may be tried, the best estimate first.
        measure_all: Runs or discards candidates; their records are in the state when it returns.
        early_stopping: Number of such rounds; by default 3.
    """
    place = {candidate: number for number, candidate in enumerate(ranked)}
    patience, failed = early_stopping if early_stopping is not None else 3, 0
    while not state.is_spent() and failed < patience:
        best = state.best()
        near = [one for key in space.dimensions for one in space.neighbours(best.candidate, key)] if best else []
        near = sorted((one for one in set(near) if one in place and one not in state.records), key=place.__getitem__)
        pool = list(dict.fromkeys([*near, *(one for one in ranked if one not in state.records)]))
        if not pool:
            return
        measure_all(pool[: min(width, state.budget - state.runs)])
        failed = failed + 1 if state.best() is best and not near else 0


def _is_above(candidate: Candidate, other: Candidate, key: str) -> bool:
    mine, its = candidate.get(key), other.get(key)
    return isinstance(mine, (int, float)) and isinstance(its, (int, float)) and mine > its


def memory_order(candidate: Candidate) -> tuple[Any, ...]:
    """Return a key by which candidates that need less memory come first."""
    offloaded = sum(candidate.get(key, "none") != "none" for key in (STATES_TIER, PARAMETERS_TIER))
    return candidate.get(MICRO, 1), -candidate.get(STAGE, 0), not candidate.get(CHECKPOINTING, False), -offloaded


def try_in_order(
    ranked: list[Candidate],
    state: SearchState,
    measure: Measure,
    *,
    early_stopping: int | None,
    seed: int | None = None,
) -> None:
    """Try candidates in order, as DeepSpeed's `gridsearch`; with a seed in a random one, as its `random`.

    Args:
        early_stopping: Number of trials without a gain that end the search; None: all are tried.
    """
    for candidate in _ordered(ranked, seed):
        if state.is_spent() or (early_stopping and state.tried_since_best() >= early_stopping):
            return
        if candidate not in state.records:
            measure(candidate)


def _ordered(ranked: list[Candidate], seed: int | None) -> Iterator[Candidate]:
    found = list(ranked)
    if seed is not None:
        random.Random(seed).shuffle(found)
    yield from found
