"""Regret and time of a search against the exhaustive one, for three models and two limits of memory on two CPU ranks.

python bench/tune.py --model wide
python bench/tune.py --pieces 100    (again and again, until it prints the table)
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rig.forked_trials import ForkedTrials
from rig.tuned_program import MODELS

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_engines import preload_engine_modules
from windlass.cli.benches.bench_results import write_result
from windlass.tune.search_space import SearchLimits
from windlass.tune.trial_command import ProgramCommand
from windlass.tune.trial_record import TrialRecord
from windlass.tune.tuning_run import TuningRun, TuningSettings

_HERE = Path(__file__).parent
REGRET, SHARE = 0.05, 0.25
QUANTILES = (0.3, 0.7)
"""Limits of memory: these quantiles of the peaks of all configurations."""
_RANKS = 2
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
    steps: Annotated[int, typer.Option(help="Timed steps of a trial.")] = 5,
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


def _tuning(name: str, folder: Path, settings: TuningSettings) -> TuningRun:
    path = folder / "ds.json"
    path.write_text(json.dumps(CONFIG))
    program = (str(_HERE / "rig" / "tuned_program.py"), "--model", name, "--config", str(path))
    command = ProgramCommand((), program, str(path))
    return TuningRun(CONFIG, _RANKS, command, settings, runner=ForkedTrials(_RANKS))


def _settings(folder: Path, steps: int) -> TuningSettings:
    return TuningSettings(folder / "results", limits=SearchLimits(micro_count=4), warmup=1, steps=steps, trial_s=60)


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


def _search(name: str, steps: int, rows: dict[str, Any], quantile: float) -> dict[str, Any]:
    measured = {key: row for key, row in rows.items() if "step_s" in row}
    # A search reports its own times, so the chosen configuration is judged by those of the exhaustive measurement.
    peaks = sorted(row["peak_host"] for row in measured.values())
    limit = peaks[int(quantile * (len(peaks) - 1))]
    with tempfile.TemporaryDirectory() as place:
        run = _tuning(name, Path(place), replace(_settings(Path(place), steps), memory=limit))
        begin = time.monotonic()  # with the predictions between trials
        outcome = run.run()
        seconds = time.monotonic() - begin
    best = min((key for key, row in measured.items() if row["peak_host"] <= limit), key=lambda k: measured[k]["step_s"])
    assert outcome.best is not None
    chosen = outcome.best.candidate.name
    return {
        "quantile": quantile,
        "limit_bytes": limit,
        "candidates": len(rows),
        "trials": sum(record.repeats for record in outcome.records if record.status != "discarded"),
        "discarded": sum(record.status == "discarded" for record in outcome.records),
        "seconds": seconds,
        "share": seconds / sum(row["seconds"] for row in rows.values()),
        "chosen": chosen,
        "best": best,
        "regret": measured[chosen]["step_s"] / measured[best]["step_s"] - 1,
        "chosen_peak_host": measured[chosen]["peak_host"],
        "records": [{"name": record.candidate.name, **_row(record)} for record in outcome.records],
    }


def _meets(row: dict[str, Any]) -> bool:
    return bool(row["regret"] <= REGRET and row["share"] <= SHARE)


def _table(found: dict[str, Any]) -> Table:
    table = Table(title="search against the exhaustive best", title_justify="left")
    for column in ("model", "limit, MiB", "trials", "share of the time", "chosen", "best", "regret", ""):
        table.add_column(column, justify="left" if column in ("model", "chosen", "best") else "right")
    for name, one in found.items():
        for row in one.get("searches", []):
            table.add_row(
                *(name, f"{row['limit_bytes'] / 2**20:,.0f}", f"{row['trials']} of {row['candidates']}"),
                *(f"{row['share']:.0%}", row["chosen"], row["best"], f"{row['regret']:+.1%}"),
                "" if _meets(row) else "MISS",
            )
    return table


if __name__ == "__main__":
    typer.run(main)
