"""Search for a configuration: a sampler of the optional package Optuna (Akiba et al. 2019) proposes the trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from windlass.base.errors import ConfigError
from windlass.tune.search import Measure, SearchState
from windlass.tune.search_space import Candidate, SearchSpace

_PROPOSALS = 20  # limit of the sampler's proposals for each trial of the budget, since many repeat earlier ones


def import_optuna() -> Any:
    """Return the module `optuna`.

    Raises:
        ConfigError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "--sampler optuna: Optuna is not installed; pip install 'windlass[tune]', or leave the option out"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def sample_with_optuna(
    space: SearchSpace,
    ranked: list[Candidate],
    state: SearchState,
    measure: Measure,
    *,
    early_stopping: int | None,
    load: Callable[[], Any] = import_optuna,
) -> None:
    """Run the candidate with the best estimate, then trials that Optuna's default sampler for one objective (TPE)
    proposes.

    Args:
        ranked: Candidates that may be tried, the best estimate first.
        early_stopping: The search ends after this many trials in a row without a gain; None: no such limit.
        load: Function that returns the module `optuna`.
    """
    optuna, allowed = load(), set(ranked)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    failed = optuna.trial.TrialState.FAIL
    for candidate in ranked[:1]:
        study.enqueue_trial({one.key: candidate.get(one.key, space.usual_choice(one)) for one in space.dimensions})
    for _ in range(_PROPOSALS * state.budget):
        if state.is_spent() or (early_stopping and state.tried_since_best() >= early_stopping):
            return
        trial = study.ask()
        choice = {one.key: trial.suggest_categorical(one.key, list(one.choices)) for one in space.dimensions}
        proposed, record = space.complete(choice), None
        if proposed is not None and proposed in allowed:
            record = state.records.get(proposed) or measure(proposed)
        if record is not None and record.counts:
            study.tell(trial, record.score(state.metric))
        else:
            study.tell(trial, state=failed)
