"""Regret and time of a search against the exhaustive one, for three models and two limits of memory on two CPU ranks.

python bench/tune.py --model wide
"""

from __future__ import annotations

import json
import tempfile
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
from windlass.tune.tuning_run import TuningOutcome, TuningRun, TuningSettings

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
    steps: Annotated[int, typer.Option(help="Timed steps of a trial.")] = 5,
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _HERE / "results",
) -> None:
    """Measure every configuration, then search under each limit. The exit code is 1 if a row misses a target."""
    path = results / "tune.json"
    found: dict[str, Any] = json.loads(path.read_text())["models"] if path.is_file() else {}
    preload_engine_modules("windlass")
    for name in [model] if model else list(MODELS):
        if not search:
            found[name] = {"exhaustive": _exhaustive(name, steps)}
        rows = found[name]["exhaustive"]["trials"]
        found[name]["searches"] = [_search(name, steps, rows, quantile) for quantile in QUANTILES]
        target = {"regret": REGRET, "share": SHARE}
        write_result(path, {"bench": "tune", "target": target, "config": CONFIG, "models": found})
    bench_console().print(_table(found))
    if any(not _meets(row) for one in found.values() for row in one["searches"]):
        raise typer.Exit(1)


def _run(name: str, folder: Path, settings: TuningSettings) -> TuningOutcome:
    path = folder / "ds.json"
    path.write_text(json.dumps(CONFIG))
    program = (str(_HERE / "rig" / "tuned_program.py"), "--model", name, "--config", str(path))
    command = ProgramCommand((), program, str(path))
    return TuningRun(CONFIG, _RANKS, command, settings, runner=ForkedTrials(_RANKS)).run()


def _settings(folder: Path, steps: int) -> TuningSettings:
    return TuningSettings(folder / "results", limits=SearchLimits(), warmup=2, steps=steps, trial_s=60)


def _exhaustive(name: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        settings = replace(_settings(Path(place), steps), tuner="gridsearch", trials=10**6, repeats=0, ends_early=False)
        outcome = _run(name, Path(place), settings)
    rows = {record.candidate.name: _row(record) for record in outcome.records}
    return {"seconds": outcome.seconds, "trials": rows}


def _row(record: TrialRecord) -> dict[str, Any]:
    row: dict[str, Any] = {"status": str(record.status), "seconds": record.seconds}
    if record.measured:
        row |= {"step_s": record.step_s, "peak_host": record.measured["peak_host"]}
    return row if not record.error else {**row, "error": record.error}


def _search(name: str, steps: int, rows: dict[str, Any], quantile: float) -> dict[str, Any]:
    measured = {key: row for key, row in rows.items() if "step_s" in row}
    peaks = sorted(row["peak_host"] for row in measured.values())
    limit = peaks[int(quantile * (len(peaks) - 1))]
    with tempfile.TemporaryDirectory() as place:
        outcome = _run(name, Path(place), replace(_settings(Path(place), steps), memory=limit))
    best = min((key for key, row in measured.items() if row["peak_host"] <= limit), key=lambda k: measured[k]["step_s"])
    assert outcome.best is not None
    chosen = outcome.best.candidate.name
    return {
        "quantile": quantile,
        "limit_bytes": limit,
        "candidates": len(rows),
        "trials": sum(record.repeats for record in outcome.records if record.status != "discarded"),
        "discarded": sum(record.status == "discarded" for record in outcome.records),
        "seconds": outcome.seconds,
        "share": outcome.seconds / sum(row["seconds"] for row in rows.values()),
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
        for row in one["searches"]:
            table.add_row(
                *(name, f"{row['limit_bytes'] / 2**20:,.0f}", f"{row['trials']} of {row['candidates']}"),
                *(f"{row['share']:.0%}", row["chosen"], row["best"], f"{row['regret']:+.1%}"),
                "" if _meets(row) else "MISS",
            )
    return table


if __name__ == "__main__":
    typer.run(main)
