"""Trials with recorded results: a search is replayed without running the training program, in milliseconds."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from windlass.engine.trial_job import trial_from_environment
from windlass.tune.memory_forecast import ForecastOrder, ForecastResult
from windlass.tune.search_space import Candidate
from windlass.tune.step_ranking import StepRanking
from windlass.tune.trial_process import TrialEnd

_FORECAST_S = 1.5  # seconds added to the first trial, which predicts the memory of all candidates
_FORECAST_BYTES = 20 << 20  # bytes added to the peak of the first trial
_BATCH = 32  # arbitrary: all candidates of a replay have one global batch


@dataclass(frozen=True)
class RecordedTrial:
    """Recorded trial of a configuration, and its predictions.

    Attributes:
        step_s: Time of a step.
        besides_s: Seconds of the trial besides its steps.
        peak: Bytes of a rank.
        predicted_bytes: Predicted peak.
        estimate_s: Predicted time of a step.
    """

    step_s: float
    besides_s: float
    peak: int
    predicted_bytes: int
    estimate_s: float | None


class RecordedRanking(StepRanking):
    """Predictions of time that were recorded."""

    def __init__(
        self,
        config_of: Callable[[Candidate], dict[str, Any]],
        world_size: int,
        facts: ForecastResult,
        table: Mapping[str, RecordedTrial],
    ) -> None:
        super().__init__(config_of, world_size, facts)
        self._table = table

    def _predict(self, candidate: Candidate) -> float | None:
        return self._table[candidate.name].estimate_s


class ReplayedTrials:
    """Runner of a search (`TuningRun.runner`), and its predictions of time (`TuningRun.ranking`).

    Args:
        table: Recorded trials by name of the candidate.
        limit: Bytes at which a trial ends with an out-of-memory error, as on a GPU; None: it only reports its peak.
        noise, memory_noise: Relative standard deviations of the times and peaks of each run.

    Attributes:
        runs: Names of the configurations that were run, in order.
        seconds: Recorded duration of all runs.
    """

    def __init__(
        self,
        table: Mapping[str, RecordedTrial],
        *,
        limit: int | None = None,
        noise: float = 0.0,
        memory_noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._table, self._limit = table, limit
        self._noise, self._memory_noise, self._random = noise, memory_noise, random.Random(seed)
        self.runs: list[str] = []
        self.seconds = 0.0

    def __call__(
        self, command: Sequence[str], folder: Path, environ: Mapping[str, str], limit_s: float, result: Path
    ) -> TrialEnd:
        job = trial_from_environment(environ)
        assert job is not None
        row = self._table[folder.name]
        step_s = row.step_s * math.exp(self._random.gauss(0.0, self._noise))
        peak = round(row.peak * math.exp(self._random.gauss(0.0, self._memory_noise)))
        seconds = row.besides_s
        if job.forecast_order:
            self._write_forecast(ForecastOrder.read(job.forecast_order))
            seconds += _FORECAST_S
            if self._limit is None:
                peak += _FORECAST_BYTES
        error = ""
        if self._limit is not None and peak > self._limit:
            error = f"OutOfMemoryError: {peak} bytes of {self._limit}"
        else:
            is_slow = job.slow_s is not None and step_s > job.slow_s and job.steps > 2
            steps = 2 if is_slow else job.steps
            seconds += (job.warmup + steps) * step_s
            result.write_text(json.dumps(_measured(step_s, steps, peak, job.overrides, is_slow=is_slow)))
        self.runs.append(folder.name)
        self.seconds += seconds
        return TrialEnd(1 if error else 0, error, bool(error), (), seconds)

    def ranking(
        self, config_of: Callable[[Candidate], dict[str, Any]], world_size: int, facts: ForecastResult
    ) -> RecordedRanking:
        """Return the predictions of time."""
        return RecordedRanking(config_of, world_size, facts, self._table)

    def _write_forecast(self, order: ForecastOrder) -> None:
        facts = ForecastResult(parameters=1, can_checkpoint=True)
        if order.plans_memory:
            facts.host_bytes = {name: self._table[name].predicted_bytes for name in order.candidates}
            facts.device_bytes = dict.fromkeys(order.candidates, 0)
        Path(order.result).write_text(json.dumps(asdict(facts)))


def _measured(step_s: float, steps: int, peak: int, overrides: Mapping[str, Any], *, is_slow: bool) -> dict[str, Any]:
    micro = overrides.get("train_micro_batch_size_per_gpu", 1)
    return {
        "step_s": step_s,
        "steps": [step_s] * steps,
        "forward_s": step_s / 3,
        "update_s": step_s / 10,
        "train_batch": overrides.get("train_batch_size", _BATCH),
        "micro": micro,
        "accumulation": overrides.get("gradient_accumulation_steps", 1),
        "world_size": 1,
        "fed_shape": [micro, 1],
        "parameters": 1,
        "device": "cpu",
        "peak_device": 0,
        "peak_host": peak,
        "ended_early": is_slow,
    }


def permute_stages(table: Mapping[str, RecordedTrial], seed: int) -> dict[str, RecordedTrial]:
    """Return the table with the times of the stages exchanged among configurations that are equal otherwise.

    Predictions stay those of the real stages, so they are wrong about the stages.
    """
    groups: dict[str, dict[str, list[str]]] = {}
    for name in table:
        stage, _, rest = name.partition("_")
        # Only stage 3 has a reuse distance, so a group may have several configurations of stage 3.
        groups.setdefault(rest.partition("_reuse")[0], {}).setdefault(stage, []).append(name)
    order: dict[str, str] = {}
    stages = sorted({name.partition("_")[0] for name in table})
    shuffled = list(stages)
    random.Random(seed).shuffle(shuffled)
    to = dict(zip(stages, shuffled, strict=True))
    for members in groups.values():
        for stage, names in members.items():
            others = members.get(to[stage], names)
            for number, name in enumerate(names):
                order[name] = others[min(number, len(others) - 1)]
    return {name: replace(row, step_s=table[order[name]].step_s) for name, row in table.items()}
