"""Choice of the next trial: the largest expected gain for each second that it takes.

[Note: choice of trials] Predicted times and predicted memory are corrected by all measurements so far ([Note: corrected
predictions]). The next trial has the largest product of its expected improvement on the best trial (Mockus 1975) and
its probability to fit (Gardner et al. 2014), divided by the seconds that it takes. So the first trials are those
predicted to be fastest among the candidates that fit, however much memory they need. Once no candidate promises a gain,
the configurations that differ from the best one in one key are tried, whatever their predictions: these trials reveal
wrong predictions, and correct the others. Trials that run at the same time are chosen in sequence, on the
assumption that the trials chosen before take their expected time (Ginsbourger et al. 2010).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, median

import numpy as np

from windlass.config.batch_sizes import TRAIN
from windlass.tune.cost_regression import Array, CandidateFeatures, CorrectedPredictions, Deviations
from windlass.tune.search_space import Candidate, SearchSpace
from windlass.tune.trial_record import TrialRecord, TrialStatus

# Assumptions before any measurement, the same for every model and machine; measurements correct their scale.
_TIME = Deviations(level=3.0, slope=0.3, key=0.25, pair=0.15, own=0.08, noise=0.05)
_MEMORY = Deviations(level=0.15, slope=0.1, key=0.06, pair=0.03, own=0.02, noise=0.015)
# Without predictions of memory, the measured value is -1 for a trial that fits and 1 for one that does not.
_FITTING = Deviations(level=1.0, slope=0.0, key=1.0, pair=0.5, own=0.2, noise=0.3)
_ABOVE = 1.03  # assumed memory of a trial that ran out of memory, relative to the limit
_FAILURE = math.log(2.0)  # a failed trial counts as twice as slow as the slowest trial
_SPREAD = math.log(4.0)  # without predictions, the last candidate is assumed to cost 4 times as much as the first
_UNLIKELY = 0.02  # probability to fit below which a neighbour of the best trial is not tried
_CAUTION = 2  # exponent of the probability to fit, until a trial has fitted
_LAST = 1e-9  # factor that ranks negligible gains after all others
_NORMAL = NormalDist()

NEGLIGIBLE = 0.002
"""Expected relative gain below which no trial is worth its time."""


@dataclass(frozen=True)
class SearchFacts:
    """Predictions of one search.

    Attributes:
        estimates: Predicted cost by candidate, in any unit; candidates without a prediction are missing.
        memory: Predicted bytes by candidate; not used unless all candidates have a prediction.
        limit: Bytes that a candidate may take; None: there is no limit.
        metric: DeepSpeed's name of the optimized metric.
        warmup, steps: Steps of a trial before the timed ones, and timed steps.
    """

    estimates: Mapping[Candidate, float] = field(default_factory=dict)
    memory: Mapping[Candidate, int] = field(default_factory=dict)
    limit: int | None = None
    metric: str = "throughput"
    warmup: int = 2
    steps: int = 5


@dataclass(frozen=True)
class ChosenTrial:
    """Next trial.

    Attributes:
        gain: Expected relative improvement on the best trial; infinite until a trial has fitted, and for neighbours of
            the best trial.
        seconds: Expected duration.
    """

    candidate: Candidate
    gain: float
    seconds: float


@dataclass(frozen=True)
class _TrialForecast:
    """Predictions after some trials: arrays with one entry for each candidate, and the log cost of the best trial."""

    mean: Array
    deviation: Array
    fits: Array
    seconds: Array
    best: float | None


class TrialChoice:
    """Model of the candidates of one search, see [Note: choice of trials].

    Args:
        ranked: Candidates that may be tried, the best estimate first.
    """

    def __init__(self, space: SearchSpace, ranked: Sequence[Candidate], facts: SearchFacts) -> None:
        self._space, self._ranked, self._facts = space, list(ranked), facts
        self._place = {candidate: number for number, candidate in enumerate(self._ranked)}
        features = CandidateFeatures(space, self._ranked)
        self._cost = CorrectedPredictions(features, _log_estimates(self._ranked, facts.estimates), _TIME)
        self._has_memory_estimates = facts.limit is not None and all(one in facts.memory for one in self._ranked)
        prior = [math.log(max(1, facts.memory[one])) if self._has_memory_estimates else 0.0 for one in self._ranked]
        self._memory = CorrectedPredictions(features, prior, _MEMORY if self._has_memory_estimates else _FITTING)
        self._forecast: tuple[object, _TrialForecast] | None = None

    def several(self, records: Mapping[Candidate, TrialRecord], count: int) -> list[ChosenTrial]:
        """Return at most `count` trials to run at the same time."""
        is_open = np.array([candidate not in records for candidate in self._ranked])
        chosen: list[ChosenTrial] = []
        assumed: dict[int, float] = {}
        while len(chosen) < count and is_open.any():
            forecast = self._corrected(records, assumed)
            gains = self._gains(forecast)
            worth = np.where(gains > NEGLIGIBLE, gains, _LAST * gains) / forecast.seconds
            number = int(np.where(is_open, worth, -1.0).argmax())
            gain = math.inf if forecast.best is None else float(gains[number])
            if gain < NEGLIGIBLE and (near := self._neighbours(records, forecast, is_open)):
                number, gain = min(near, key=lambda one: float(forecast.mean[one])), math.inf
            chosen.append(ChosenTrial(self._ranked[number], gain, float(forecast.seconds[number])))
            assumed[number] = float(forecast.mean[number])
            is_open[number] = False
        return chosen

    def exhaustive_seconds(self, records: Mapping[Candidate, TrialRecord]) -> float:
        """Return the expected duration of the trials of all candidates."""
        return float(self._corrected(records, {}).seconds.sum())

    def seconds(self, candidate: Candidate, records: Mapping[Candidate, TrialRecord]) -> float:
        """Return the expected duration of a trial."""
        return float(self._corrected(records, {}).seconds[self._place[candidate]])

    def _neighbours(
        self, records: Mapping[Candidate, TrialRecord], forecast: _TrialForecast, is_open: Array
    ) -> list[int]:
        """Return the neighbours of the best trial that were not tried and may fit."""
        best = min((one for one in records.values() if one.counts), key=self._log_cost)
        near = [self._place[one] for one in self._space.neighbours(best.candidate) if one in self._place]
        return [number for number in near if is_open[number] and forecast.fits[number] > _UNLIKELY]

    def _gains(self, forecast: _TrialForecast) -> Array:
        # Until a trial has fitted, rank candidates by predicted speed, weighted by the probability to fit.
        if forecast.best is None:
            return np.asarray(forecast.fits**_CAUTION * np.exp(forecast.mean.min() - forecast.mean))
        return np.asarray(forecast.fits * _expected_improvement(forecast.best, forecast.mean, forecast.deviation))

    def _corrected(self, records: Mapping[Candidate, TrialRecord], assumed: Mapping[int, float]) -> _TrialForecast:
        """Return the corrected predictions, computed anew after each trial that was run (not discarded)."""
        ran = [one for one in records.values() if one.ran and one.candidate in self._place]
        state = ran, dict(assumed)
        if self._forecast is None or self._forecast[0] != state:
            mean, deviation = self._costs(ran, assumed)
            best = min((self._log_cost(one) for one in ran if one.counts), default=None)
            forecast = _TrialForecast(mean, deviation, self._probability_to_fit(ran), self._durations(ran, mean), best)
            self._forecast = state, forecast
        return self._forecast[1]

    def _costs(self, ran: Sequence[TrialRecord], assumed: Mapping[int, float]) -> tuple[Array, Array]:
        """Return mean and standard deviation of the logarithm of the cost of each candidate."""
        timed = {
            self._place[one.candidate]: self._log_cost(one)
            for one in ran
            if one.counts or one.status is TrialStatus.OVER
        }
        if timed:
            slowest = max(timed.values()) + _FAILURE
            timed |= {self._place[one.candidate]: slowest for one in ran if one.status is TrialStatus.FAILED}
        timed |= assumed
        return self._cost.fit(list(timed), list(timed.values()))

    def _probability_to_fit(self, ran: Sequence[TrialRecord]) -> Array:
        limit = self._facts.limit
        if limit is None or not self._has_memory_estimates:
            return self._guess_fits(ran)
        peaks = {self._place[one.candidate]: math.log(peak) for one in ran if (peak := _peak(one))}
        full = [self._place[one.candidate] for one in ran if one.status is TrialStatus.MEMORY]
        mean, _ = self._memory.fit(list(peaks), list(peaks.values()))
        peaks |= {number: max(math.log(_ABOVE * limit), float(mean[number])) for number in full}
        mean, deviation = self._memory.fit(list(peaks), list(peaks.values()))
        return _cumulative((math.log(limit) - mean) / deviation)

    def _guess_fits(self, ran: Sequence[TrialRecord]) -> Array:
        """Return the probability to fit, by similarity to trials that did or did not fit."""
        over = (TrialStatus.MEMORY, TrialStatus.OVER)
        signs = {
            self._place[one.candidate]: 1.0 if one.status in over else -1.0
            for one in ran
            if one.counts or one.status in over
        }
        if all(sign < 0 for sign in signs.values()):
            return np.ones(len(self._ranked))
        mean, deviation = self._memory.fit(list(signs), list(signs.values()))
        return _cumulative(-mean / deviation)

    def _durations(self, ran: Sequence[TrialRecord], mean: Array) -> Array:
        """Return the expected seconds of each trial: its steps, its start, and its end."""
        timed = [one for one in ran if one.measured and one.seconds]
        if not timed:
            return np.ones(len(self._ranked))
        besides = [max(0.0, one.seconds / one.repeats - self._steps_of(one) * one.step_s) for one in timed]
        # The predicted cost may have another unit than seconds: measured trials give the ratio of step time to cost.
        batches = np.array([float(one.get(TRAIN, 1)) for one in self._ranked])
        per_sample = self._facts.metric in ("throughput", "flops")
        scale = batches if per_sample else np.ones(len(self._ranked))
        ratios = [
            one.step_s / math.exp(self._log_cost(one)) / float(scale[self._place[one.candidate]]) for one in timed
        ]
        steps = self._facts.warmup + self._facts.steps
        return np.asarray(median(besides) + steps * median(ratios) * scale * np.exp(mean))

    def _steps_of(self, record: TrialRecord) -> float:
        return self._facts.warmup + len(record.measured.get("steps", ())) / record.repeats

    def _log_cost(self, record: TrialRecord) -> float:
        score = record.score(self._facts.metric)
        return -math.log(score) if score > 0 else math.log(max(-score, 1e-12))


def _peak(record: TrialRecord) -> int:
    return int(record.measured.get("peak_device") or record.measured.get("peak_host") or 0)


def _log_estimates(ranked: Sequence[Candidate], estimates: Mapping[Candidate, float]) -> list[float]:
    """Return the logarithms of the estimates. A candidate without an estimate gets the largest one; if no candidate
    has an estimate, the values follow the order of the candidates."""
    known = {one: math.log(value) for one, value in estimates.items() if 0 < value < math.inf}
    if not known:
        return [_SPREAD * number / max(1, len(ranked) - 1) for number in range(len(ranked))]
    worst = max(known.values())
    return [known.get(candidate, worst) for candidate in ranked]


def _expected_improvement(best: float, mean: Array, deviation: Array) -> Array:
    u = (best - mean) / deviation
    density = np.exp(-0.5 * u**2) / math.sqrt(2 * math.pi)
    return np.asarray(deviation * (u * _cumulative(u) + density))


def _cumulative(values: Array) -> Array:
    return np.asarray(np.vectorize(_NORMAL.cdf, otypes=[float])(values))
