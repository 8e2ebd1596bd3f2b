"""Laws of the search on made-up costs: small regret within its budget, whatever the estimate says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.config.batch_sizes import ACCUMULATION, MICRO, TRAIN
from windlass.tune.optuna_sampler import sample_with_optuna
from windlass.tune.search import SearchState, search_by_model, try_in_order
from windlass.tune.search_space import STAGE, Candidate, SearchLimits, SearchSpace, build_space
from windlass.tune.trial_choice import SearchFacts, TrialChoice
from windlass.tune.trial_record import TrialRecord, TrialStatus

RAW: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "activation_checkpointing": {"enabled": "auto"},
    "zero_optimization": {
        "stage": "auto",
        "reduce_bucket_size": "auto",
        "stage3_max_reuse_distance": "auto",
        "overlap_comm": "auto",
    },
}


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return build_space(RAW, 2, SearchLimits())


@pytest.fixture(scope="module")
def candidates(space: SearchSpace) -> list[Candidate]:
    return space.candidates()


def costs_of(candidates: list[Candidate], seed: int) -> dict[Candidate, float]:
    """Return made-up times: products of factors for each value, its pair with the stage, and the micro-batch."""
    rng = random.Random(seed)
    factors: dict[Any, float] = {}
    best_micro = rng.choice([1, 2, 4, 8, 16, 32])
    found = {}
    for candidate in candidates:
        cost = 1.0 + 0.15 * abs(candidate.get(MICRO).bit_length() - best_micro.bit_length())
        for key, value in candidate.values:
            if key in (MICRO, ACCUMULATION, TRAIN):
                continue
            cost *= factors.setdefault((key, value), 1.0 + rng.random() * 0.5)
            cost *= factors.setdefault((key, value, candidate.get(STAGE)), 1.0 + rng.random() * 0.05)
        found[candidate] = cost
    return found


def run(
    space: SearchSpace,
    candidates: list[Candidate],
    costs: dict[Candidate, float],
    *,
    estimates: dict[Candidate, float] | None = None,
    budget: int | None = None,
    width: int = 1,
    seconds: float = 1.0,
    **more: Any,
) -> SearchState:
    state = SearchState(budget=budget or max(8, len(candidates) // 4))
    ranked = sorted(candidates, key=estimates.__getitem__) if estimates else candidates
    choice = TrialChoice(space, ranked, SearchFacts(estimates or {}))

    def measure_all(some: Sequence[Candidate]) -> None:
        assert 0 < len(some) <= width
        for candidate in some:
            assert candidate not in state.records
            if costs[candidate] == float("inf"):
                state.records[candidate] = TrialRecord(candidate, TrialStatus.MEMORY, error="out of memory")
            else:
                measured = {"step_s": costs[candidate], "steps": [costs[candidate]] * 5, "train_batch": 64}
                measured |= {"peak_device": 0, "peak_host": 1}
                state.records[candidate] = TrialRecord(
                    candidate, TrialStatus.MEASURED, measured, seconds=seconds + 7 * costs[candidate]
                )

    search_by_model(choice, state, measure_all, width=width, **more)
    return state


@pytest.mark.parametrize("order", ["estimate", "random", "wrong"])
def test_regret_within_a_quarter_of_the_trials(space: SearchSpace, candidates: list[Candidate], order: str) -> None:
    regrets = []
    for seed in range(6):
        costs, rng = costs_of(candidates, seed), random.Random(seed)
        estimates = {one: cost * (1 + 0.3 * rng.random()) for one, cost in costs.items()}
        if order == "random":
            estimates = {one: 1 + rng.random() for one in costs}
        elif order == "wrong":
            estimates = {one: 1 / estimate for one, estimate in estimates.items()}
        state = run(space, candidates, costs, estimates=estimates)
        best = state.best()
        assert best is not None and state.runs <= len(candidates) // 4
        regrets.append(best.step_s / min(costs.values()) - 1)
    assert max(regrets) <= 0.05, regrets


@pytest.mark.parametrize("width", [2, 8])
def test_regret_of_trials_that_run_at_the_same_time(
    space: SearchSpace, candidates: list[Candidate], width: int
) -> None:
    costs = costs_of(candidates, width)
    estimates = {one: cost * (1 + 0.3 * random.Random(one.name).random()) for one, cost in costs.items()}
    state = run(space, candidates, costs, estimates=estimates, width=width)
    best = state.best()
    assert best is not None and best.step_s <= 1.05 * min(costs.values())


def test_time_is_limited_to_a_share_of_what_all_candidates_take(
    space: SearchSpace, candidates: list[Candidate]
) -> None:
    costs = {one: cost / 1000 for one, cost in costs_of(candidates, 1).items()}
    whole = sum(100.0 + 7 * cost for cost in costs.values())
    free = run(space, candidates, costs, budget=len(candidates), seconds=100.0)
    state = run(space, candidates, costs, budget=len(candidates), share=0.05, seconds=100.0)
    assert free.seconds > 0.05 * whole >= state.seconds > 0.04 * whole


def test_a_search_ends_once_no_trial_promises_a_gain(space: SearchSpace, candidates: list[Candidate]) -> None:
    costs = {one: 100.0 if one is not candidates[7] else 1.0 for one in candidates}
    state = run(space, candidates, costs, estimates=costs, budget=len(candidates))
    near = set(space.neighbours(candidates[7]))
    assert next(iter(state.records)) == candidates[7]
    assert near <= set(state.records) and state.runs < len(near) + 10


def test_trials_without_a_gain_end_a_search_with_early_stopping(
    space: SearchSpace, candidates: list[Candidate]
) -> None:
    state = run(space, candidates, dict.fromkeys(candidates, 1.0), early_stopping=3)
    assert state.runs == 4


class Study:
    """Stand-in for `optuna.Study` with its methods ask, tell and enqueue_trial. It draws at random."""

    def __init__(self) -> None:
        self.rng, self.queue, self.told = random.Random(0), list[dict[str, Any]](), list[Any]()

    def enqueue_trial(self, params: dict[str, Any]) -> None:
        self.queue.append(params)

    def ask(self) -> Any:
        fixed = self.queue.pop(0) if self.queue else {}

        def suggest_categorical(name: str, choices: list[Any]) -> Any:
            return fixed.get(name, self.rng.choice(choices))

        return SimpleNamespace(suggest_categorical=suggest_categorical)

    def tell(self, trial: Any, value: float | None = None, state: str | None = None) -> None:
        assert (value is None) != (state is None)
        self.told.append(value if state is None else state)


def test_optuna_proposes_the_trials(space: SearchSpace, candidates: list[Candidate]) -> None:
    costs, study = costs_of(candidates, 1), Study()
    for candidate in candidates[::3]:
        costs[candidate] = float("inf")
    optuna = SimpleNamespace(
        create_study=lambda direction, sampler: study,
        samplers=SimpleNamespace(TPESampler=lambda seed: None),
        trial=SimpleNamespace(TrialState=SimpleNamespace(FAIL="fail")),
    )
    ranked = sorted(candidates, key=costs.__getitem__)
    state = SearchState(budget=30)

    def measure(candidate: Candidate) -> TrialRecord:
        status = TrialStatus.MEMORY if costs[candidate] == float("inf") else TrialStatus.MEASURED
        record = TrialRecord(candidate, status, {"step_s": costs[candidate], "train_batch": 64})
        return state.records.setdefault(candidate, record)

    sample_with_optuna(space, ranked, state, measure, early_stopping=None, load=lambda: optuna)
    assert state.runs == 30 and next(iter(state.records)) == ranked[0]  # the best estimate comes first
    assert state.best() is not None and "fail" in study.told
    assert max(one for one in study.told if one != "fail") == pytest.approx(64 / costs[ranked[0]])


def test_candidates_that_do_not_fit_are_walked_around(space: SearchSpace, candidates: list[Candidate]) -> None:
    costs = costs_of(candidates, 3)
    for candidate in candidates:
        if candidate.get(MICRO) > 2 or candidate.get(STAGE) < 2:
            costs[candidate] = float("inf")
    state = run(space, candidates, costs, budget=50)
    best = state.best()
    assert best is not None and best.step_s <= 1.05 * min(costs.values())


def test_a_search_where_nothing_fits_ends_at_its_budget(space: SearchSpace, candidates: list[Candidate]) -> None:
    state = run(space, candidates, dict.fromkeys(candidates, float("inf")), budget=9)
    assert state.best() is None and state.runs == 9


def test_orders_of_deepspeeds_tuners(candidates: list[Candidate]) -> None:
    def order(seed: int | None, early_stopping: int | None, times: dict[Candidate, float]) -> list[Candidate]:
        state = SearchState(budget=20)

        def measure(candidate: Candidate) -> TrialRecord:
            record = TrialRecord(
                candidate, TrialStatus.MEASURED, {"step_s": times.get(candidate, 1.0), "train_batch": 64}
            )
            return state.records.setdefault(candidate, record)

        def measure_each(some: Sequence[Candidate]) -> None:
            for candidate in some:
                measure(candidate)

        try_in_order(candidates, state, measure_each, early_stopping=early_stopping, seed=seed)
        return list(state.records)

    assert order(None, None, {}) == candidates[:20]
    assert order(None, 5, {candidates[2]: 0.5}) == candidates[:8]
    shuffled = order(0, None, {})
    assert shuffled != candidates[:20] and shuffled == order(0, None, {})
