"""Regret and duration of the search of `windlass tune`, relative to an exhaustive search.

Three models and two memory limits, on two CPU ranks.

python bench/tune.py --model wide
python bench/tune.py --pieces 100    (repeat until it prints the table)
python bench/tune.py --search        (right after all trials: load changes times, and shared pages change peaks)
python bench/tune.py --replay 20     (searches in the recorded trials and in changed copies of them; trains nothing)
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rig.forked_trials import ForkedTrials
from rig.replayed_trials import RecordedTrial, ReplayedTrials, permute_stages
from rig.tuned_program import MODELS

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_engines import preload_engine_modules
from windlass.cli.benches.bench_results import write_result
from windlass.tune.memory_forecast import BatchShape, CandidatePlanner, facts_of
from windlass.tune.search_space import SearchLimits
from windlass.tune.step_ranking import StepRanking
from windlass.tune.trial_command import ProgramCommand
from windlass.tune.trial_record import TrialRecord
from windlass.tune.tuning_run import TuningRun, TuningSettings

_HERE = Path(__file__).parent
REGRET, SHARE = 0.05, 0.25
QUANTILES = (0.3, 0.7)
"""Each memory limit is in the widest gap between the peaks of all configurations near one of these quantiles."""
_NEAR = 4  # sorted peaks on each side of a quantile that `_limit` examines; a peak varies by 1 to 3 % between runs
_RANKS = 2
_WARMUP, _STEPS = 1, 5
_DRIFT = 0.03  # allowed relative difference of peaks from the exhaustive data, which set the limit
_AGAIN = 3  # times that the chosen and the best configuration are measured again, in turn
_NOISE, _PEAK_NOISE = 0.05, 0.005  # relative standard deviations of a replayed trial's times and peaks
_BASE = 105 << 20  # bytes of a process without the model, as the recorded searches found
CONFIG: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "activation_checkpointing": {"enabled": "auto"},
    "zero_optimization": {
        "stage": "auto",
        "stage3_max_reuse_distance": "auto",
        "stage3_param_persistence_threshold": 0,
    },
}


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}; by default all.")] = "",
    search: Annotated[
        bool, typer.Option("--search", help="Only search again, against stored exhaustive data.")
    ] = False,
    pieces: Annotated[
        float,
        typer.Option(min=0, help="Stop after some seconds; the next call continues. 0: run to the end."),
    ] = 0.0,
    replay: Annotated[int, typer.Option(min=0, help="Search in recorded trials and so many changed copies.")] = 0,
    steps: Annotated[int, typer.Option(help="Timed steps of a trial.")] = _STEPS,
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _HERE / "results",
) -> None:
    """Measure every configuration, then search under each limit. The exit code is 1 if a row misses a target."""
    path = results / "tune.json"
    stored: dict[str, Any] = json.loads(path.read_text())["models"] if path.is_file() else {}
    begin = time.monotonic()

    def is_over() -> bool:
        return 0 < pieces < time.monotonic() - begin

    def write() -> None:
        target = {"regret": REGRET, "share": SHARE}
        write_result(path, {"bench": "tune", "target": target, "config": CONFIG, "models": stored})

    if replay:
        for name in [model] if model else list(stored):
            stored[name]["replays"] = _replay(name, stored[name], replay)
        write()
        bench_console().print(_replay_table(stored))
        return
    preload_engine_modules("windlass")
    for name in [model] if model else list(MODELS):
        one = stored.setdefault(name, {})
        if not pieces:
            one |= {"searches": []} if search else {"exhaustive": {"trials": {}}, "searches": []}
        rows = one.setdefault("exhaustive", {"trials": {}})["trials"]
        one.setdefault("searches", [])
        if not search and not _measure_all(name, steps, rows, is_over, write):
            bench_console().print(f"{name}: {len(rows)} configurations are measured; call again to continue")
            return
        for quantile in QUANTILES[len(one["searches"]) :]:
            if is_over():
                bench_console().print(f"{name}: {len(one['searches'])} searches are done; call again to continue")
                return
            one["searches"].append(_search(name, steps, rows, quantile))
            write()
    bench_console().print(_table(stored))
    if any(not _meets(row) for one in stored.values() for row in one["searches"]):
        raise typer.Exit(1)


def _tuning(name: str, folder: Path, settings: TuningSettings, **more: Any) -> TuningRun:
    path = folder / "ds.json"
    path.write_text(json.dumps(CONFIG))
    program = (str(_HERE / "rig" / "tuned_program.py"), "--model", name, "--config", str(path))
    command = ProgramCommand((), program, str(path))
    return TuningRun(CONFIG, _RANKS, command, settings, **({"runner": ForkedTrials(_RANKS)} | more))


def _settings(folder: Path, steps: int) -> TuningSettings:
    return TuningSettings(
        folder / "results", limits=SearchLimits(micro_count=4), warmup=_WARMUP, steps=steps, trial_seconds=60
    )


def _measure_all(
    name: str, steps: int, rows: dict[str, Any], is_over: Callable[[], bool], write: Callable[[], None]
) -> bool:
    """Measure the configurations that are not in `rows` yet. Return False if the time is over before the last one."""
    with tempfile.TemporaryDirectory() as place:
        run = _tuning(name, Path(place), replace(_settings(Path(place), steps), ends_early=False))
        for candidate in run.candidates:
            if candidate.name in rows:
                continue
            if is_over():
                return False
            rows[candidate.name] = _row(run.measure(candidate))
            write()
    return True


def _row(record: TrialRecord) -> dict[str, Any]:
    row: dict[str, Any] = {"status": str(record.status), "seconds": record.seconds}
    if record.measured:
        row |= {"step_s": record.step_s, "peak_host": record.measured["peak_host"]}
    return row if not record.error else {**row, "error": record.error}


def _limit(peaks: list[int], quantile: float) -> int:
    """Return the middle of the widest gap between neighbouring peaks near a quantile."""
    peaks = sorted(peaks)
    at = int(quantile * (len(peaks) - 1))
    near = range(max(0, at - _NEAR), min(len(peaks) - 1, at + _NEAR))
    below = max(near, key=lambda number: peaks[number + 1] - peaks[number])
    return (peaks[below] + peaks[below + 1]) // 2


def _search(name: str, steps: int, rows: dict[str, Any], quantile: float) -> dict[str, Any]:
    measured = {key: row for key, row in rows.items() if "step_s" in row}
    # A search measures times of its own, but its choice is judged by the times of the exhaustive measurement.
    limit = _limit([row["peak_host"] for row in measured.values()], quantile)
    with tempfile.TemporaryDirectory() as place:
        run = _tuning(name, Path(place), replace(_settings(Path(place), steps), memory=limit))
        begin = time.monotonic()  # the time includes predictions between trials
        outcome = run.run()
        seconds = time.monotonic() - begin
    best = min((key for key, row in measured.items() if row["peak_host"] <= limit), key=lambda k: measured[k]["step_s"])
    assert outcome.best is not None
    chosen = outcome.best.candidate.name
    again = _measure_again(name, steps, [chosen, best]) if chosen != best else {}
    peaks = {one.candidate.name: one.measured["peak_host"] for one in outcome.records if one.measured}
    drifts = [peak / measured[key]["peak_host"] - 1 for key, peak in peaks.items() if key in measured]
    times = {key: statistics.median([measured[key]["step_s"], *again.get(key, [])]) for key in (chosen, best)}
    return {
        "quantile": quantile,
        "limit_bytes": limit,
        "base_bytes": outcome.forecast.base,
        "drift": statistics.median(drifts),
        "candidates": len(rows),
        "trials": sum(record.repeats for record in outcome.records if record.ran),
        "discarded": sum(not record.ran for record in outcome.records),
        "seconds": seconds,
        "share": seconds / sum(row["seconds"] for row in rows.values()),
        "chosen": chosen,
        "best": best,
        "regret": times[chosen] / times[best] - 1,
        "again": again,
        "chosen_peak_host": measured[chosen]["peak_host"],
        "records": [{"name": record.candidate.name, **_row(record)} for record in outcome.records],
    }


def _measure_again(name: str, steps: int, names: list[str]) -> dict[str, list[float]]:
    """Return more times of some configurations, measured in turn.

    The smallest of many noisy times is too small, so the first times alone would make every other choice look slower.
    """
    found: dict[str, list[float]] = {key: [] for key in names}
    with tempfile.TemporaryDirectory() as place:
        run = _tuning(name, Path(place), replace(_settings(Path(place), steps), ends_early=False))
        candidates = {one.name: one for one in run.candidates}
        for _ in range(_AGAIN):
            for key in names:
                record = run.measure(candidates[key])
                found[key] += [record.step_s] if record.measured else []
    return found


def _predict(name: str, steps: int) -> dict[str, dict[str, Any]]:
    """Return predicted bytes and seconds of all configurations, as the first trial of a search predicts them."""
    make, length = MODELS[name]
    with torch.device("meta"):
        model = make()
    planner = CandidatePlanner(model, CONFIG, _RANKS, "cpu")
    batch = BatchShape(1, (torch.zeros((1, length), dtype=torch.int64),), {})
    with tempfile.TemporaryDirectory() as place:
        run = _tuning(name, Path(place), _settings(Path(place), steps))
    facts = replace(facts_of(model, base=_BASE), fed=batch.fed, tokens=batch.tokens, micro=1)
    ranking = StepRanking(run.space.config_of, _RANKS, facts)
    return {
        one.name: {
            "predicted_bytes": planner.peaks(one.overrides, batch)[1] + _BASE,
            "estimate_s": ranking.seconds(one),
        }
        for one in run.candidates
    }


def _replay(name: str, one: dict[str, Any], copies: int) -> list[dict[str, Any]]:
    """Search in the recorded trials of a model, and in copies with noise and with exchanged times of the stages."""
    rows = one["exhaustive"]["trials"]
    predicted = one.setdefault("predictions", {})
    predicted |= _predict(name, _STEPS) if set(predicted) != set(rows) else {}
    table = {
        key: RecordedTrial(
            row["step_s"],
            max(0.0, row["seconds"] - (_WARMUP + _STEPS) * row["step_s"]),
            row["peak_host"],
            **predicted[key],
        )
        for key, row in rows.items()
        if "step_s" in row
    }
    found = []
    for quantile in QUANTILES:
        limit = _limit([row.peak for row in table.values()], quantile)
        for fails in (False, True):
            kinds = {
                "recorded": [_replay_once(name, table, limit, fails=fails)],
                "noise": [_replay_once(name, table, limit, fails=fails, seed=seed) for seed in range(1, copies + 1)],
                "stages": [
                    _replay_once(name, permute_stages(table, seed), limit, fails=fails) for seed in range(1, copies + 1)
                ],
            }
            found += [
                {
                    "quantile": quantile,
                    "limit_bytes": limit,
                    "out_of_memory": fails,
                    "kind": kind,
                    "searches": len(results),
                    "within": sum(regret <= REGRET for regret, *_ in results),
                    "worst_regret": max(regret for regret, *_ in results),
                    "worst_share": max(share for _, share, _ in results),
                    "most_trials": max(trials for *_, trials in results),
                }
                for kind, results in kinds.items()
            ]
    return found


def _replay_once(
    name: str, table: Mapping[str, RecordedTrial], limit: int, *, fails: bool, seed: int = 0
) -> tuple[float, float, int]:
    """Return one search's regret, time relative to that of all trials, and number of trials. A seed adds noise."""
    times, peaks = (_NOISE, _PEAK_NOISE) if seed else (0.0, 0.0)
    trials = ReplayedTrials(table, limit=limit if fails else None, noise=times, memory_noise=peaks, seed=seed)
    with tempfile.TemporaryDirectory() as place:
        settings = replace(_settings(Path(place), _STEPS), memory=limit)
        outcome = _tuning(name, Path(place), settings, runner=trials, ranking=trials.ranking).run()
    assert outcome.best is not None
    best = min(row.step_s for row in table.values() if row.peak <= limit)
    whole = sum(row.besides_s + (_WARMUP + _STEPS) * row.step_s for row in table.values())
    return table[outcome.best.candidate.name].step_s / best - 1, trials.seconds / whole, len(trials.runs)


def _replay_table(found: dict[str, Any]) -> Table:
    table = Table(title="searches in recorded trials", title_justify="left")
    for column in ("model", "limit, MiB", "above it", "trials are", "regret at most 5 %", "worst", "time", "trials"):
        table.add_column(column, justify="left" if column in ("model", "above it", "trials are") else "right")
    kinds = {"recorded": "as recorded", "noise": "with noise", "stages": "of exchanged stages"}
    for name, one in found.items():
        for row in one.get("replays", []):
            table.add_row(
                *(name, f"{row['limit_bytes'] / 2**20:,.0f}", "fails" if row["out_of_memory"] else "is measured"),
                *(kinds[row["kind"]], f"{row['within']} of {row['searches']}", f"{row['worst_regret']:+.1%}"),
                *(f"{row['worst_share']:.0%}", str(row["most_trials"])),
            )
    return table


def _meets(row: dict[str, Any]) -> bool:
    return bool(row["regret"] <= REGRET and row["share"] <= SHARE and abs(row["drift"]) <= _DRIFT)


def _table(found: dict[str, Any]) -> Table:
    table = Table(title="search against the exhaustive best", title_justify="left")
    for column in ("model", "limit, MiB", "trials", "share of the time", "chosen", "best", "regret", "peaks", ""):
        table.add_column(column, justify="left" if column in ("model", "chosen", "best") else "right")
    for name, one in found.items():
        for row in one.get("searches", []):
            table.add_row(
                *(name, f"{row['limit_bytes'] / 2**20:,.0f}", f"{row['trials']} of {row['candidates']}"),
                *(f"{row['share']:.0%}", row["chosen"], row["best"], f"{row['regret']:+.1%}"),
                f"{row['drift']:+.1%}",
                "" if _meets(row) else "MISS",
            )
    return table


if __name__ == "__main__":
    typer.run(main)
