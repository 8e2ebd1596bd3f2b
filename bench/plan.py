"""Predicted peak memory of a rank against its measured peak (PSS on a CPU, torch's allocator on a GPU), for each
configuration of `rig/plan_cases`.

python bench/plan.py --rows 0:4
python bench/plan.py --gpu
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rig.plan_cases import CASES, GPU_CASES, MemoryCase
from rig.plan_rank import MemoryRank

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.rank_pool import RankPool
from windlass.config import load_config
from windlass.parallel.model_checkpointing import enable_checkpointing
from windlass.plan.memory_plan import DEVICE, HOST
from windlass.plan.plan_run import RunShape, plan_memory
from windlass.plan.planned_layout import Target
from windlass.plan.planned_model import build_on_meta

_RESULTS = Path(__file__).parent / "results"
TOLERANCE = 0.10
_MIB = 1 << 20


def main(
    rows: Annotated[str, typer.Option(help="Rows to run, as START:STOP of the list.")] = ":",
    keep: Annotated[bool, typer.Option(help="Keep earlier rows of the JSON that are not run now.")] = True,
    predict: Annotated[bool, typer.Option("--predict", help="Measure nothing: predict anew, for stored rows.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Rows of one rank on a GPU, into plan_gpu.json.")] = False,
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
) -> None:
    """Measure the chosen rows, print all rows with their errors, and write plan.json (with --gpu: plan_gpu.json). The
    exit code is 1 if a prediction is wrong by more than 10 %."""
    if gpu and not predict and not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no CUDA device here; run on a host with a GPU", param_hint="--gpu")
    start, _, stop = rows.partition(":")
    cases = GPU_CASES if gpu else CASES
    chosen = cases[int(start or 0) : int(stop) if stop else None]
    path = results / ("plan_gpu.json" if gpu else "plan.json")
    found: dict[str, Any] = json.loads(path.read_text())["rows"] if keep and path.is_file() else {}
    for case in chosen:
        if predict and case.name not in found:
            continue
        measured = found[case.name]["measured_bytes"] if predict else _measure(case)
        found[case.name] = {"predicted_bytes": _predict(case), "measured_bytes": measured}
        bench_console().print(_line(case.name, found[case.name]), soft_wrap=True)
        if not predict:
            _write(path, cases, found)  # after each row, so that an interrupted run keeps those before
    misses = _write(path, cases, found)
    bench_console().print(_table(found))
    bench_console().print(
        f"{len(found)} of {len(cases)} rows measured, {len(misses)} miss by more than {TOLERANCE:.0%}"
    )
    if misses:
        raise typer.Exit(1)


def _write(path: Path, cases: tuple[MemoryCase, ...], found: dict[str, Any]) -> list[str]:
    """Write the rows. Return the names of those that miss."""
    misses = [name for name, row in found.items() if abs(_error(row)) > TOLERANCE]
    missing = [case.name for case in cases if case.name not in found]
    write_result(path, {"bench": "plan", "tolerance": TOLERANCE, "rows": found, "misses": misses, "not run": missing})
    return misses


def _predict(case: MemoryCase) -> int:
    model = build_on_meta(case.build, case.name)
    if case.checkpointing:
        enable_checkpointing(model)
    on_gpu = case.device == "cuda"
    target = Target("cuda", "nccl") if on_gpu else Target("cpu", case.transport)
    run = RunShape(case.ranks, case.length, target, sharded_init=case.sharded_init)
    plan = plan_memory(model, load_config(case.config(".")), run)
    return plan.peak(DEVICE if on_gpu else HOST, ("init", "load", "forward", "backward", "step"))


def _measure(case: MemoryCase) -> int:
    """Return the mean of the ranks' peaks, in which each rank counts its part of the pages that several ranks map.

    For a pipeline, return the largest peak of a rank.
    """
    env = {"OMP_NUM_THREADS": "1", "WINDLASS_LOG_LEVEL": "ERROR"}
    with RankPool(partial(MemoryRank, case), case.ranks, label=case.name, env=env) as ranks:
        peaks = [rank["peaks"]["run"] for rank in ranks.ask("run")]
    return max(peaks) if case.axis == "pp" else int(sum(peaks) / len(peaks))


def _error(row: dict[str, Any]) -> float:
    return float(row["predicted_bytes"] / row["measured_bytes"] - 1)


def _line(name: str, row: dict[str, Any]) -> str:
    predicted, measured = row["predicted_bytes"] / _MIB, row["measured_bytes"] / _MIB
    return f"{name}: predicted {predicted:,.1f} MiB, measured {measured:,.1f} MiB, {_error(row):+.1%}"


def _table(found: dict[str, Any]) -> Table:
    table = Table(title="peak memory of a rank, MiB", title_justify="left")
    for column in ("configuration", "predicted", "measured", "error", ""):
        table.add_column(column, justify="left" if column == "configuration" else "right")
    for name, row in found.items():
        amounts = [f"{row[key] / _MIB:,.1f}" for key in ("predicted_bytes", "measured_bytes")]
        table.add_row(name, *amounts, f"{_error(row):+.1%}", "MISS" if abs(_error(row)) > TOLERANCE else "")
    return table


if __name__ == "__main__":
    typer.run(main)
