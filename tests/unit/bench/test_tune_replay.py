"""Laws of a whole search on recorded trials of three models: small regret and time, also with faults and noise.

`tests/data/tune_trials.json` has for each configuration: seconds of a step, seconds of the trial outside its steps,
measured and predicted bytes, and predicted seconds of a step.
"""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.tune.search_space import SearchLimits
from windlass.tune.trial_command import ProgramCommand
from windlass.tune.trial_record import TrialStatus
from windlass.tune.tuning_run import TuningError, TuningOutcome, TuningRun, TuningSettings, default_budget

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "tune_trials.json").read_text())
RAW: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "activation_checkpointing": {"enabled": "auto"},
    "zero_optimization": {"stage": "auto", "stage3_max_reuse_distance": "auto"},
}
WARMUP, STEPS = 1, 5


def table_of(model: str) -> dict[str, Any]:
    from rig.replayed_trials import RecordedTrial

    return {name: RecordedTrial(*row) for name, row in RECORDED[model].items()}


def replay(
    table: dict[str, Any], limit: int | None, *, fails: bool = False, raw: dict[str, Any] = RAW, **noise: Any
) -> tuple[TuningOutcome, Any]:
    from rig.replayed_trials import ReplayedTrials

    trials = ReplayedTrials(table, limit=limit if fails else None, **noise)
    with tempfile.TemporaryDirectory() as place:
        limits = SearchLimits(micro_count=4)
        given = TuningSettings(Path(place), limits=limits, memory=limit, warmup=WARMUP, steps=STEPS)
        command = ProgramCommand((), ("train.py",))
        return TuningRun(raw, 2, command, given, runner=trials, ranking=trials.ranking).run(), trials


def regret(table: dict[str, Any], limit: int | None, outcome: TuningOutcome) -> float:
    assert outcome.best is not None
    best = min(row.step_s for row in table.values() if limit is None or row.peak <= limit)
    return float(table[outcome.best.candidate.name].step_s / best - 1)


def share(table: dict[str, Any], trials: Any) -> float:
    whole = sum(row.besides_s + (WARMUP + STEPS) * row.step_s for row in table.values())
    return float(trials.seconds / whole)


@pytest.mark.parametrize("quantile", [0.3, 0.7])
@pytest.mark.parametrize("model", RECORDED)
def test_regret_and_time_of_recorded_searches(model: str, quantile: float) -> None:
    table = table_of(model)
    peaks = sorted(row.peak for row in table.values())
    limit = peaks[int(quantile * (len(peaks) - 1))]
    outcome, trials = replay(table, limit)
    assert regret(table, limit, outcome) <= 0.05 and share(table, trials) <= 0.25
    assert len(trials.runs) <= default_budget(len(table))


@pytest.mark.parametrize("model", RECORDED)
def test_trials_that_run_out_of_memory_and_noise(model: str) -> None:
    table = table_of(model)
    limit = sorted(row.peak for row in table.values())[len(table) // 2] + (4 << 20)
    outcome, trials = replay(table, limit, fails=True, noise=0.02, seed=1)
    assert regret(table, limit, outcome) <= 0.05 and share(table, trials) <= 0.25
    assert outcome.best is not None and outcome.best.measured["peak_host"] <= limit


def test_a_small_space_is_searched_whatever_its_trials_take() -> None:
    table, raw = table_of("deep"), {**RAW, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    raw |= {"activation_checkpointing": {"enabled": False}, "zero_optimization": {"stage": [0, 2]}}
    from rig.replayed_trials import ReplayedTrials

    trials = ReplayedTrials({"z0": table["z0_mbs8_gas2"], "z2": table["z2_mbs8_gas2"]})
    with tempfile.TemporaryDirectory() as place:
        given = TuningSettings(Path(place), warmup=WARMUP, steps=STEPS)
        run = TuningRun(raw, 2, ProgramCommand((), ("train.py",)), given, runner=trials, ranking=trials.ranking)
        assert {record.candidate.name for record in run.run().records} == {"z0", "z2"}


def test_times_of_other_stages_than_predicted() -> None:
    from rig.replayed_trials import permute_stages

    table = permute_stages(table_of("wide"), 3)
    assert sorted(table) == sorted(RECORDED["wide"]) and table != table_of("wide")
    outcome, trials = replay(table, None)
    assert regret(table, None, outcome) <= 0.05 and share(table, trials) <= 0.25


def test_a_configuration_that_fails_once_it_runs_again_is_not_the_best() -> None:
    table = table_of("deep")
    outcome, trials = replay(table, None)
    again = [name for name in trials.runs if trials.runs.count(name) > 1]
    assert again and outcome.best is not None and outcome.best.repeats > 1
    fastest = outcome.best.candidate.name

    def fail(*arguments: Any) -> Any:
        trials._limit = 0 if arguments[1].name == fastest and fastest in trials.runs else None
        return trials(*arguments)

    trials.runs.clear()
    with tempfile.TemporaryDirectory() as place:
        settings = TuningSettings(Path(place), limits=SearchLimits(micro_count=4), warmup=WARMUP, steps=STEPS)
        command = ProgramCommand((), ("train.py",))
        found = TuningRun(RAW, 2, command, settings, runner=fail, ranking=trials.ranking).run()
    statuses = {record.candidate.name: record.status for record in found.records}
    assert statuses[fastest] is TrialStatus.MEMORY
    assert found.best is not None and found.best.candidate.name != fastest


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_costs_and_predictions_end_with_the_best_measured_one_that_fits(data: st.DataObject) -> None:
    table = table_of("deep")
    rng = data.draw(st.randoms(use_true_random=False))
    table = {
        name: replace(
            row,
            step_s=rng.choice([1e-4, 0.1, 0.3, 5.0]) * rng.random() + 1e-6,
            estimate_s=rng.choice([None, row.estimate_s, 1e-6, 1e6]),
            predicted_bytes=rng.choice([row.predicted_bytes, 1, row.peak]),
        )
        for name, row in table.items()
    }
    limit = data.draw(st.sampled_from([None, 1, 125 << 20, 140 << 20]))
    fails = data.draw(st.booleans())
    try:
        outcome, trials = replay(table, limit, fails=fails)
    except TuningError as error:
        assert "no configuration fits" in str(error) and limit is not None
        return
    assert outcome.best is not None and len(trials.runs) <= default_budget(len(table))
    fitting = [name for name in trials.runs if limit is None or table[name].peak <= limit]
    assert table[outcome.best.candidate.name].step_s == min(table[name].step_s for name in fitting)


def test_the_run_that_makes_the_forecast_counts_in_the_budget() -> None:
    """With a memory limit on a CPU, the candidate that makes the forecast runs a second time as a trial."""
    rng = random.Random(24)  # a seed whose times make the search spend its whole budget
    times = {name: rng.choice([1e-4, 0.1, 0.3, 5.0]) * rng.random() + 1e-6 for name in table_of("deep")}
    table = {name: replace(row, step_s=times[name]) for name, row in table_of("deep").items()}
    outcome, trials = replay(table, 140 << 20)
    assert outcome.best is not None and trials.runs[0] == trials.runs[1]
    assert len(trials.runs) == default_budget(len(table))


def test_every_candidate_of_a_small_space_runs_beside_the_run_that_makes_the_forecast() -> None:
    table = {name.removesuffix("_mbs8_gas2"): row for name, row in table_of("deep").items() if "_mbs8_gas2" in name}
    section = {"stage": [0, 1], "stage3_max_reuse_distance": 0}
    raw = {**RAW, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "zero_optimization": section}
    raw["activation_checkpointing"] = {"enabled": False}
    outcome, trials = replay(table, 1 << 30, raw=raw)
    assert outcome.best is not None and sorted(trials.runs) == ["z0", "z0", "z1"]
