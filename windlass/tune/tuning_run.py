"""Search for the best configuration: forecast of memory, order of trials, trials, and the files written after each."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from windlass.base.bounded_json import JsonError, parse_json
from windlass.base.errors import WindlassError
from windlass.base.log import logger
from windlass.base.processes import interrupting_signal
from windlass.config.batch_sizes import MICRO
from windlass.engine.trial_job import TrialJob
from windlass.tune.memory_forecast import ATTRIBUTE, ForecastOrder, ForecastResult
from windlass.tune.optuna_sampler import sample_with_optuna
from windlass.tune.ray_trials import RayTrials, TrialCall
from windlass.tune.result_files import ResultFiles
from windlass.tune.search import SearchState, memory_order, search_by_model, try_in_order
from windlass.tune.search_space import (
    CHECKPOINTING,
    Candidate,
    SearchLimits,
    SearchSpace,
    build_space,
)
from windlass.tune.step_ranking import StepRanking
from windlass.tune.trial_choice import SearchFacts, TrialChoice
from windlass.tune.trial_command import ProgramCommand
from windlass.tune.trial_process import TrialEnd, run_trial
from windlass.tune.trial_record import TrialRecord, TrialStatus

_MARGIN = 1.15  # a candidate is discarded unmeasured only if its prediction exceeds the limit by this factor
_OVER = 1.03  # a measured peak above the limit by less than this factor does not count against other candidates
_SLOW = 1.3  # a trial ends early if its first two timed steps both exceed the best trial's median by this factor
_CLOSE = 0.1  # a trial slower than the best by less than this fraction is run again
_CLOSEST = 3  # maximum number of candidates that are run again
_SHARE = 0.25  # limit of the search's time, as a fraction of the time that the trials of all candidates would take
_SEARCHED = 0.8  # fraction of the search's time for new trials; the rest is for repeated runs of the best
_COUNTED = 0.5  # default limit of trials, as a fraction of the candidates
_FEWEST, _MOST = 8, 50
_RESULT_KEYS = frozenset(
    ("step_s", "steps", "forward_s", "update_s", "train_batch", "micro", "world_size", "fed_shape", "parameters",
     "peak_device", "peak_host", "ended_early")
)  # fmt: skip


class TuningError(WindlassError, RuntimeError):
    """Error of a search that found no configuration."""


@dataclass(frozen=True)
class TuningSettings:
    """Settings of a search.

    Attributes:
        results: Folder of results.
        exps: Folder for files with the settings of each trial (DeepSpeed's `exps_dir`); None: no such files.
        limits: Bounds of the search space.
        memory: Limit of a rank's memory in bytes: of its device, or of its process on a CPU. None: all memory of a GPU;
            no limit on a CPU.
        tuner: `model_based`, `gridsearch` or `random`, as in `autotuning.tuner_type`; or `optuna`.
        trials: Largest number of trials. None: as many as fit into a quarter of the time that all candidates would
            take, at most half of the candidates and at most 50; with fewer than 32 candidates, at least 8 (or all).
        early_stopping: Number of trials without a gain that end the search; None: no such limit.
        warmup, steps: Steps of a trial before the timed ones, and timed steps.
        trial_seconds: Limit of the time of a trial, in seconds.
        metric: `throughput`, `latency`, `flops`, `forward` or `step`.
        repeats: Largest number of times that a candidate close to the best is run again.
        ends_early: End trials that are much slower than the best one.
        keeps_results: Trials of an earlier search in the same folder count, if their configuration is the same.
    """

    results: Path
    exps: Path | None = None
    limits: SearchLimits = SearchLimits()
    memory: int | None = None
    tuner: str = "model_based"
    trials: int | None = None
    early_stopping: int | None = None
    warmup: int = 2
    steps: int = 5
    trial_seconds: float = 600.0
    metric: str = "throughput"
    repeats: int = 2
    keeps_results: bool = False
    ends_early: bool = True


@dataclass
class TuningOutcome:
    """Result of a search.

    Attributes:
        best: Best measured trial; None: none was measured.
        config: Configuration of `best`.
        records: All trials in their order, discarded candidates included.
        candidates: Number of candidates in the search space.
        forecast: Facts of model and machine, and predicted memory.
        seconds: Duration of all trials.
        interrupted_by: Number of the signal that stopped the search; None: the search ended by itself.
        refused: Reasons why combinations cannot run, by candidate name.
    """

    best: TrialRecord | None
    config: dict[str, Any] | None
    records: list[TrialRecord]
    candidates: int
    forecast: ForecastResult
    seconds: float = 0.0
    interrupted_by: int | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _PreparedTrial:
    """Trial whose files are written."""

    candidate: Candidate
    job: TrialJob
    call: TrialCall


@dataclass
class TuningRun:
    """Search for the best configuration of a training program, by trial runs of the program.

    Args:
        parallel: Runner of several trials at the same time, on several hosts; None: trials run in sequence.
        runner: Function that runs one trial, see `run_trial`.
        ranking: Function that builds the predictor of step times from the forecast of the first trial, see
            `StepRanking`.
    """

    raw: dict[str, Any]
    world_size: int
    command: ProgramCommand
    settings: TuningSettings
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    runner: Callable[[Sequence[str], Path, Mapping[str, str], float, Path], TrialEnd] = run_trial
    parallel: RayTrials | None = None
    ranking: Callable[[Callable[[Candidate], dict[str, Any]], int, ForecastResult], StepRanking] = StepRanking

    def __post_init__(self) -> None:
        self.space: SearchSpace = build_space(self.raw, self.world_size, self.settings.limits, self.command.config_name)
        self.candidates = self.space.candidates()
        name = Path(self.command.program[0]).stem
        self.files = ResultFiles(self.settings.results, self.settings.exps, name, self.world_size)
        self._budget = self.settings.trials or default_budget(len(self.candidates))
        reserved = 2 * self.settings.repeats if self._budget > _FEWEST else 0  # repeated runs of the best
        self.state = SearchState(self.settings.metric, max(1, self._budget - reserved))
        self._choice: TrialChoice | None = None
        self.forecast: ForecastResult | None = None
        self._ranking: StepRanking | None = None
        self._shown_best: TrialRecord | None = None
        self._on_record: Callable[[TrialRecord], None] | None = None

    def run(self, on_record: Callable[[TrialRecord], None] | None = None) -> TuningOutcome:
        """Run the search.

        Args:
            on_record: Function that is called with the record of each trial.

        Raises:
            TuningError: no trial could be measured. The message has the errors of the trials, or, if no configuration
                fits into memory, the one that exceeds the limit least.
        """
        interrupted_by, self._on_record = None, on_record
        self.files.remove_best(self.command.config)
        try:
            self._search()
            self._repeat_best()
            self._spend_rest()
        except KeyboardInterrupt as error:
            interrupted_by = interrupting_signal(error)
        records = list(self.state.records.values())
        best = self.state.best()
        self.files.write_summary(records, best, self.settings.metric)
        if best is None and interrupted_by is None:
            raise TuningError(self._explain_failure(records))
        config = self.space.config_of(best.candidate) if best is not None else None
        forecast = self.forecast or ForecastResult()
        spent = sum(record.seconds for record in records)
        refused = self.space.refused
        return TuningOutcome(best, config, records, len(self.candidates), forecast, spent, interrupted_by, refused)

    def measure(self, candidate: Candidate) -> TrialRecord:
        """Run the trial of a candidate, or discard the candidate, see `_discarded`."""
        return self._keep(self._with_estimates(self._discarded(candidate) or self._run(candidate)))

    def _measure_each(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            self.measure(candidate)

    def measure_all(self, candidates: Sequence[Candidate]) -> None:
        """Measure candidates at the same time, on the hosts of `parallel`."""
        assert self.parallel is not None
        waiting: list[_PreparedTrial] = []
        for candidate in candidates:
            prepared = self._discarded(candidate) or self._prepare(candidate)
            if isinstance(prepared, _PreparedTrial):
                waiting.append(prepared)
            else:
                self._keep(self._with_estimates(prepared))
        ends = self.parallel([one.call for one in waiting]) if waiting else []
        for one, end in zip(waiting, ends, strict=True):
            self._keep(self._with_estimates(self._record_of(one, end)))

    def _discarded(self, candidate: Candidate) -> TrialRecord | None:
        """Return the record of a candidate that need not be run; None: run the candidate."""
        predicted, limit = self._predicted(candidate), self._limit()
        if predicted is not None and limit is not None and predicted * self._memory_ratio() > _MARGIN * limit:
            reason = (
                f"predicted memory {_mib(predicted)} (trials so far took {self._memory_ratio():.2f} times their "
                f"prediction), limit {_mib(limit)}"
            )
        elif candidate.get(CHECKPOINTING) and self.forecast is not None and not self.forecast.can_checkpoint:
            reason = "the model has no switch for activation checkpointing"
        elif (smaller := self._smaller_failure(candidate)) is not None:
            reason = f"needs at least as much memory as {smaller.candidate.name}, which did not fit: {smaller.error}"
        else:
            return None
        return TrialRecord(candidate, TrialStatus.DISCARDED, error=reason)

    def _with_estimates(self, record: TrialRecord) -> TrialRecord:
        estimate = self._ranking.seconds(record.candidate) if self._ranking is not None else None
        return replace(record, predicted_bytes=self._predicted(record.candidate), estimate_s=estimate)

    def _search(self) -> None:
        smallest = sorted(self.candidates, key=memory_order)
        start = self.space.start()
        first = [start] if start is not None and start in set(smallest) else []
        for candidate in [*first, *smallest]:  # the first trial that starts also makes the forecast
            if self.forecast is not None or self.state.is_spent():
                break
            if candidate not in self.state.records:
                self.measure(candidate)
        ranked, settings, state = self._ranked(), self.settings, self.state
        patience = settings.early_stopping
        measure_all, width = self._measure_each, 1
        if self.parallel is not None:
            measure_all, width = self.measure_all, self.parallel.hosts
        if settings.tuner in ("gridsearch", "random"):
            seed = 0 if settings.tuner == "random" else None
            try_in_order(ranked, state, measure_all, width=width, early_stopping=patience, seed=seed)
        elif self.parallel is not None:
            search_by_model(self._make_choice(ranked), state, measure_all, width=width, early_stopping=patience)
        elif settings.tuner == "model_based":
            self._choice = self._make_choice(ranked)
            for candidate in ranked:
                if candidate not in state.records and (record := self._discarded(candidate)) is not None:
                    self._keep(self._with_estimates(record))
            self._follow_model(self._choice, _SEARCHED)
        else:
            sample_with_optuna(self.space, ranked, state, self.measure, early_stopping=patience)

    def _follow_model(self, choice: TrialChoice, part: float) -> None:
        """Run the trials that `choice` selects, within the fraction `part` of the limit of the search's time."""
        share = self._share()
        search_by_model(
            choice,
            self.state,
            self._measure_each,
            early_stopping=self.settings.early_stopping,
            share=part * share if share is not None else None,
            fewest=_FEWEST if len(self.candidates) * _SHARE < _FEWEST else 1,
        )

    def _spend_rest(self) -> None:
        """Continue the search with the budget that repeated runs of the best did not use. If there is a new best trial,
        repeat the best again."""
        before = self.state.best()
        if self._choice is None or before is None:
            return
        again = sum(record.repeats - 1 for record in self.state.records.values() if record.ran)
        self.state.budget = self._budget - again
        self._follow_model(self._choice, 1.0)
        if self.state.best() is not before:
            self._repeat_best()

    def _make_choice(self, ranked: list[Candidate]) -> TrialChoice:
        settings, ranking = self.settings, self._ranking
        estimate = None
        if ranking is not None:
            is_per_sample = settings.metric in ("throughput", "flops")
            estimate = ranking.seconds_per_sample if is_per_sample else lambda one: ranking.seconds(one) or math.inf
        memory = {one: nbytes for one in ranked if (nbytes := self._predicted(one)) is not None}
        estimates = {one: estimate(one) for one in ranked} if estimate is not None else {}
        facts = SearchFacts(estimates, memory, self._limit(), settings.metric, settings.warmup, settings.steps)
        return TrialChoice(self.space, ranked, facts)

    def _share(self) -> float | None:
        """Return the limit of the search's time, as a fraction of the time of the trials of all candidates.

        None: the number of trials is limited instead.
        """
        if self.settings.trials is not None:
            return None
        return max(_SHARE, min(_FEWEST, len(self.candidates)) / len(self.candidates))

    def _ranked(self) -> list[Candidate]:
        """Return the candidates, the best estimate first; without estimates, those that need most memory first."""
        ranked = sorted(self.candidates, key=memory_order, reverse=True)
        if self._ranking is None:
            return ranked
        ranked.sort(key=self._ranking.seconds_per_sample)
        if self._ranking.problem:
            logger.warning("configurations without a predicted time are tried last: %s", self._ranking.problem)
        return ranked

    def _predicted(self, candidate: Candidate) -> int | None:
        found = self.forecast
        if found is None or candidate.name not in found.device_bytes:
            return None
        if found.device == "cpu":
            return found.host_bytes[candidate.name] + found.base
        return found.device_bytes[candidate.name]

    def _memory_ratio(self) -> float:
        """Return the median ratio of measured to predicted memory of the trials so far."""
        known = ((_need(one), one.predicted_bytes) for one in self.state.records.values() if one.measured)
        return statistics.median([need / predicted for need, predicted in known if need and predicted] or [1.0])

    def _limit(self) -> int | None:
        return self.settings.memory or (self.forecast.device_total if self.forecast is not None else 0) or None

    def _smaller_failure(self, candidate: Candidate) -> TrialRecord | None:
        """Return a trial that did not fit although its configuration needs no more memory than `candidate`."""
        if self._choice is not None and self._predicted(candidate) is not None:
            return None  # the corrected prediction of the candidate's memory decides instead
        for record in self.state.records.values():
            clearly = record.status is TrialStatus.MEMORY
            if record.status is TrialStatus.OVER and (limit := self._limit()) is not None:
                clearly = (_need(record) or 0) > _OVER * limit
            if clearly and self.space.needs_no_less_memory(candidate, record.candidate):
                return record
        return None

    def _run(self, candidate: Candidate, *, ends_early: bool = True) -> TrialRecord:
        prepared = self._prepare(candidate, ends_early=ends_early)
        if isinstance(prepared, TrialRecord):
            return prepared
        call = prepared.call
        end = self.runner(call.command, Path(call.folder), call.environ, call.limit_s, Path(call.result))
        record = self._record_of(prepared, end)
        if record.measured and prepared.job.forecast and self._shares_memory_with_forecast():
            Path(call.result).unlink()
            if not self.settings.trials and self._budget > _FEWEST:
                # The run with the forecast uses one trial of the budget, although its record is replaced. If the user
                # set the number of trials, or if the budget is the smallest one, only candidates count, so that a
                # small space is measured completely.
                self._budget, self.state.budget = self._budget - 1, self.state.budget - 1
            again = self._run(candidate, ends_early=ends_early)
            return replace(again, seconds=record.seconds + again.seconds)
        return record

    def _shares_memory_with_forecast(self) -> bool:
        """Return True if the memory of the trial that made the forecast includes memory of the forecast itself."""
        return self._limit() is not None and self.forecast is not None and self.forecast.device == "cpu"

    def _prepare(self, candidate: Candidate, *, ends_early: bool = True) -> _PreparedTrial | TrialRecord:
        """Write the files of a trial, and return the prepared trial; or return the record of an earlier search.

        A candidate that this search has measured is always run: the files in its folder are then this search's own.
        """
        settings, folder = self.settings, self.files.folder_of(candidate)
        result = folder / "result.json"
        config = self.space.config_of(candidate)
        is_new = candidate not in self.state.records
        if settings.keeps_results and is_new and (earlier := self._earlier(candidate, config, folder)) is not None:
            return earlier
        result.unlink(missing_ok=True)
        best = self.state.best()
        ends_early = ends_early and settings.ends_early and best is not None and self._keeps_batch(candidate, best)
        slow = _SLOW * best.step_s if best is not None and ends_early else None
        overrides = self.space.overrides_of(candidate)
        job = TrialJob(str(result), overrides, settings.warmup, settings.steps, slow)
        if self.forecast is None:
            job = self._with_forecast(job)
        command = self.command.for_trial(folder / "ds_config.json", config)
        self.files.write_order(candidate, config, command)
        environ = {**self.environ, **job.environment()}
        return _PreparedTrial(
            candidate, job, TrialCall(tuple(command), str(folder), environ, settings.trial_seconds, str(result))
        )

    def _record_of(self, prepared: _PreparedTrial, end: TrialEnd) -> TrialRecord:
        self._read_forecast(prepared.job)
        record = TrialRecord(
            prepared.candidate, TrialStatus.FAILED, error=end.error, left_behind=end.left_behind, seconds=end.seconds
        )
        result = Path(prepared.call.result)
        if not result.is_file():
            status = TrialStatus.MEMORY if end.is_out_of_memory else TrialStatus.FAILED
            return replace(record, status=status)
        return self._judge(replace(record, measured=json.loads(result.read_text())))

    def _judge(self, record: TrialRecord) -> TrialRecord:
        """Return the record of a measured trial with its status."""
        measured, limit = record.measured, self._limit()
        fed = (measured["fed_shape"] or [measured["micro"]])[0]
        if MICRO in record.candidate.overrides and fed != measured["micro"]:
            reason = (
                f"the program feeds batches of {fed} and the trial's micro-batch is {measured['micro']}: let it read "
                "train_micro_batch_size_per_gpu from the configuration or the engine, or name its option with "
                "--map train_micro_batch_size_per_gpu=--OPTION"
            )
            return replace(record, status=TrialStatus.FAILED, error=reason)
        peak = measured["peak_device"] or measured["peak_host"]
        if limit is not None and peak > limit:
            return replace(record, status=TrialStatus.OVER, error=f"measured {_mib(peak)}, limit {_mib(limit)}")
        return replace(record, status=TrialStatus.SLOW if measured["ended_early"] else TrialStatus.MEASURED)

    def _earlier(self, candidate: Candidate, config: dict[str, Any], folder: Path) -> TrialRecord | None:
        """Return the record of an earlier search's trial; None: none has this configuration and number of ranks, or its
        files are damaged.
        """
        found = []
        for path in (folder / "ds_config.json", folder / "result.json"):
            try:
                found.append(parse_json(path.read_bytes()))
            except (OSError, JsonError):
                return None
        earlier, measured = found
        if earlier != config or not isinstance(measured, dict) or not measured.keys() >= _RESULT_KEYS:
            return None
        if measured["world_size"] != self.world_size:
            return None
        return self._judge(TrialRecord(candidate, TrialStatus.MEASURED, measured))

    def _keeps_batch(self, candidate: Candidate, best: TrialRecord) -> bool:
        same = candidate.get("train_batch_size") == best.candidate.get("train_batch_size")
        return same and self.settings.metric in ("throughput", "latency", "flops")

    def _with_forecast(self, job: TrialJob) -> TrialJob:
        plans = self.settings.memory is not None or self.settings.limits.has_device_memory
        order = ForecastOrder(
            {one.name: self.space.overrides_of(one) for one in self.candidates} if plans else {},
            str(self.files.results / "forecast.json"),
            plans,
        )
        path = self.files.results / "forecast_order.json"
        order.write(path)
        Path(order.result).unlink(missing_ok=True)
        return replace(job, forecast=ATTRIBUTE, forecast_order=str(path))

    def _read_forecast(self, job: TrialJob) -> None:
        path = self.files.results / "forecast.json"
        if job.forecast and path.is_file():
            self.forecast = ForecastResult(**json.loads(path.read_text()))
            self._ranking = self.ranking(self.space.config_of, self.world_size, self.forecast)

    def _keep(self, record: TrialRecord) -> TrialRecord:
        """Store a record.

        Raises:
            TuningError: see `_require_a_chance`.
        """
        self.state.records[record.candidate] = record
        self.files.write_metrics(record)
        self._write_best()
        if self._on_record is not None:
            self._on_record(record)
        self._require_a_chance()
        return record

    def _write_best(self) -> None:
        best = self.state.best()
        if best is not None and best is not self._shown_best:
            self._shown_best = best
            config = self.space.config_of(best.candidate)
            optimal = self.files.results / "ds_config_optimal.json"
            self.files.write_best(config, self.command.for_trial(optimal, config))

    def _require_a_chance(self) -> None:
        """Stop if the program fails in the same way whatever the configuration is.

        Raises:
            TuningError: all trials so far, at least three, failed with the same error, not for lack of memory.
        """
        records = list(self.state.records.values())
        failed = [record for record in records if record.status is TrialStatus.FAILED]
        if len(failed) >= 3 and len(failed) == len(records) and len({record.error for record in failed}) == 1:
            raise TuningError(self._explain_failure(records))

    def _repeat_best(self) -> None:
        """Run candidates close to the best again, in turn, so that one lucky run does not decide."""
        while (record := self._next_repeat()) is not None:
            again = self._run(record.candidate, ends_early=False)
            spent, repeats = record.seconds + again.seconds, record.repeats + 1
            if again.measured and again.counts:
                steps = [*record.measured["steps"], *again.measured["steps"]]
                measured = {**record.measured, "steps": steps, "step_s": statistics.median(steps)}
                self._keep(replace(record, measured=measured, seconds=spent, repeats=repeats))
            else:  # a configuration that does not run every time is not the best one
                again = self._with_estimates(again)
                self._keep(replace(again, seconds=spent, repeats=repeats))

    def _next_repeat(self) -> TrialRecord | None:
        """Return the record of the candidate to run again; None: no other candidate is close to the best,
        the close ones were repeated often enough, or the budget or the time is spent.
        """
        best, state = self.state.best(), self.state
        if best is None or sum(record.repeats for record in state.records.values() if record.ran) >= self._budget:
            return None
        score = best.score(state.metric)
        close = [
            record
            for record in state.records.values()
            if record.status is TrialStatus.MEASURED and score - record.score(state.metric) <= _CLOSE * abs(score)
        ]
        close.sort(key=lambda record: -record.score(state.metric))
        close = close[:_CLOSEST]
        if len(close) < 2:
            return None
        record = min(close, key=lambda one: one.repeats)
        if record.repeats > self.settings.repeats:
            return None
        share = self._share()
        if share is not None and self._choice is not None:
            left = share * self._choice.exhaustive_seconds(state.records) - state.seconds
            if self._choice.seconds(record.candidate, state.records) > left:
                return None
        return record

    def _explain_failure(self, records: list[TrialRecord]) -> str:
        tried = [record for record in records if record.status is not TrialStatus.DISCARDED]
        kinds = {record.status for record in records}
        limit = self._limit()
        if kinds <= {TrialStatus.DISCARDED, TrialStatus.MEMORY, TrialStatus.OVER}:
            planned = len(records) - len(tried)
            lines = [f"no configuration fits: {len(tried)} were run, {planned} were discarded without a run"]
            needs = [(need, record) for record in records if (need := _need(record)) is not None]
            if needs and limit is not None:
                need, nearest = min(needs, key=lambda pair: pair[0])
                lines.append(
                    f"the nearest is {nearest.candidate.name}: it needs {_mib(need)}, {_mib(max(0, need - limit))} "
                    f"more than the limit of {_mib(limit)}"
                )
            elif tried:
                lines.append(f"the last error: {tried[-1].error}")
            lines.append("use more ranks, shorter samples or --nvme DIR, or allow smaller micro-batches")
            return "\n".join(lines)
        counted: dict[str, int] = {}
        for record in tried:
            counted[record.error] = counted.get(record.error, 0) + 1
        errors = "\n".join(f"  {count} x {error}" for error, count in counted.items())
        return f"no trial could be measured:\n{errors}\nsee the output of the trials in {self.files.results}"


def _need(record: TrialRecord) -> int | None:
    """Return the bytes that a candidate needs: measured, or predicted."""
    if record.measured:
        return int(record.measured["peak_device"] or record.measured["peak_host"])
    return record.predicted_bytes


def default_budget(candidates: int) -> int:
    """Return the largest number of trials: half of the candidates, but at least 8 (or all) and at most 50."""
    return min(candidates, max(_FEWEST, min(_MOST, round(_COUNTED * candidates))))


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
