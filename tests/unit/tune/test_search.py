"""Laws of the search on made-up costs: small regret within its budget, whatever the estimate says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.config.batch_sizes import ACCUMULATION, MICRO, TRAIN
from windlass.tune.optuna_sampler import sample_with_optuna
from windlass.tune.search import SearchState, search_in_rounds, try_in_order, walk
from windlass.tune.search_space import STAGE, Candidate, SearchLimits, SearchSpace, build_space
from windlass.tune.trial_record import TrialRecord, TrialStatus
from windlass.tune.tuning_run import default_budget

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
    """Return made-up times: a factor for each value, some for pairs of values, and a best micro-batch."""
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


def search(space: SearchSpace, ranked: list[Candidate], costs: dict[Candidate, float], **more: Any) -> SearchState:
    state = SearchState(budget=more.pop("budget", default_budget(len(ranked))))

    def measure(candidate: Candidate) -> TrialRecord:
        assert candidate not in state.records
        if costs[candidate] == float("inf"):
            record = TrialRecord(candidate, TrialStatus.MEMORY, error="out of memory")
        else:
            record = TrialRecord(candidate, TrialStatus.MEASURED, {"step_s": costs[candidate], "train_batch": 64})
        state.records[candidate] = record
        return record

    order = more.pop("order", walk)
    order(space, ranked, state, measure, **more)
    return state


@pytest.mark.parametrize("order", ["estimate", "random", "wrong"])
def test_regret_within_a_quarter_of_the_trials(space: SearchSpace, candidates: list[Candidate], order: str) -> None:
    regrets = []
    for seed in range(12):
        costs, rng = costs_of(candidates, seed), random.Random(seed)
        ranked = list(candidates)
        rng.shuffle(ranked)
        if order != "random":
            ranked.sort(key=lambda one: costs[one] * (1 + 0.3 * rng.random()), reverse=order == "wrong")
        state = search(space, ranked, costs)
        best = state.best()
        assert best is not None and state.runs <= default_budget(len(candidates)) <= len(candidates) // 4 + 1
        regrets.append(best.step_s / min(costs.values()) - 1)
    assert max(regrets) <= 0.05, regrets


@pytest.mark.parametrize("width", [2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_regret_of_rounds_that_run_at_the_same_time(
    space: SearchSpace, candidates: list[Candidate], width: int, seed: int
) -> None:
    costs, rounds = costs_of(candidates, seed), list[int]()

    def order(space: SearchSpace, ranked: list[Candidate], state: SearchState, measure: Any) -> None:
        def measure_all(some: Sequence[Candidate]) -> None:
            rounds.append(len(some))
            for one in some:
                measure(one)

        search_in_rounds(space, ranked, state, measure_all, width=width)

    ranked = sorted(candidates, key=lambda one: costs[one] * (1 + 0.3 * random.Random(one.name).random()))
    state = search(space, ranked, costs, order=order)
    best = state.best()
    assert best is not None and best.step_s <= 1.05 * min(costs.values())
    assert max(rounds) <= width and sum(rounds) == state.runs <= default_budget(len(candidates))


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
    state = search(space, ranked, costs, budget=30, order=sample_with_optuna, early_stopping=None, load=lambda: optuna)
    assert state.runs == 30 and next(iter(state.records)) == ranked[0]  # the best estimate comes first
    assert state.best() is not None and "fail" in study.told
    assert max(one for one in study.told if one != "fail") == pytest.approx(64 / costs[ranked[0]])


def test_candidates_that_do_not_fit_are_walked_around(space: SearchSpace, candidates: list[Candidate]) -> None:
    costs = costs_of(candidates, 3)
    for candidate in candidates:
        if candidate.get(MICRO) > 2 or candidate.get(STAGE) < 2:
            costs[candidate] = float("inf")
    state = search(space, candidates, costs, budget=40)
    best = state.best()
    assert best is not None and best.step_s <= 1.05 * min(costs.values())


def test_a_search_where_nothing_fits_ends_at_its_budget(space: SearchSpace, candidates: list[Candidate]) -> None:
    state = search(space, candidates, dict.fromkeys(candidates, float("inf")), budget=9)
    assert state.best() is None and state.runs == 9


def test_orders_of_deepspeeds_tuners(candidates: list[Candidate]) -> None:
    def run(seed: int | None, early_stopping: int | None, times: dict[Candidate, float]) -> list[Candidate]:
        state = SearchState(budget=20)

        def measure(candidate: Candidate) -> TrialRecord:
            record = TrialRecord(
                candidate, TrialStatus.MEASURED, {"step_s": times.get(candidate, 1.0), "train_batch": 64}
            )
            return state.records.setdefault(candidate, record)

        try_in_order(candidates, state, measure, early_stopping=early_stopping, seed=seed)
        return list(state.records)

    assert run(None, None, {}) == candidates[:20]
    assert run(None, 5, {candidates[2]: 0.5}) == candidates[:8]
    shuffled = run(0, None, {})
    assert shuffled != candidates[:20] and shuffled == run(0, None, {})
