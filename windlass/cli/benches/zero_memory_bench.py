"""Experiment of `windlass bench zero-memory`: memory of each engine, and a check that all train the same parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from windlass.cli.benches.bar_chart import BarPanel, draw_bars
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_engines import check_engine_name
from windlass.cli.benches.bench_launch import run_task
from windlass.cli.benches.bench_rank import MEMORY_POINTS
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.bench_tasks import ZeroMemoryTask
from windlass.cli.benches.expected_order import SUM_TOLERANCE, all_equal, compare_with_expected_order

ENGINES = ("ddp", "zro", "fsdp2", "fsdp3", "windlass-0", "windlass-1", "windlass-2", "windlass-3")
_TUTORIAL_ORDER = ("windlass-3", "windlass-2", "windlass-1", "windlass-0")  # smallest memory first


def run_zero_memory_bench(
    engines: list[str], nproc: int, width: int, depth: int, batch: int, steps: int, out: Path
) -> bool:
    """Measure, print, and write `zero-memory.json` and `.png` to `out`. Return True if all parameter sums are equal."""
    for engine in engines:
        check_engine_name(engine)
    console = bench_console()
    results: dict[str, dict[str, Any]] = {}
    for engine in engines:
        console.print(f"{engine}: {nproc} fresh ranks", style="dim")
        ranks = run_task(ZeroMemoryTask(engine, width, depth, batch, steps), nproc)
        results[engine] = _largest_rank(ranks)
    sums = {engine: result["parameter_sum"] for engine, result in results.items()}
    same = all_equal(sums, SUM_TOLERANCE)
    console.print(_memory_table(results, f"{depth} x Linear({width}), {nproc} ranks"))
    conclusions = [
        f"parameter sums after {steps} steps: {'equal' if same else 'NOT equal'} (to {SUM_TOLERANCE:g} of the sum)"
    ]
    peaks = {engine: result["bytes_per_parameter"] for engine, result in results.items()}
    expected = [engine for engine in _TUTORIAL_ORDER if engine in peaks]
    if len(expected) > 1:
        conclusions.append(
            compare_with_expected_order(
                "peak memory (bytes a parameter)", {e: peaks[e] for e in expected}, expected, 0.03
            )
        )
    for line in conclusions:
        console.print(line, soft_wrap=True)
    result = {"bench": "zero-memory", "ranks": nproc, "width": width, "depth": depth, "batch": batch, "steps": steps}
    written = write_result(out / "zero-memory.json", {**result, "engines": results, "verdicts": conclusions})
    drawn = draw_bars(
        [BarPanel("peak memory of a rank", "bytes a parameter", peaks)],
        out / "zero-memory.png",
        f"{depth} x Linear({width}), {nproc} ranks",
    )
    console.print(f"written: {written}{' and its .png' if drawn else ''}", soft_wrap=True)
    return same


def _largest_rank(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the measurements of the rank with the highest peak, which the table shows for an engine."""
    worst = max(ranks, key=lambda rank: int(rank["peaks"][MEMORY_POINTS[-1]]))
    return {**worst, "bytes_per_parameter": worst["peaks"][MEMORY_POINTS[-1]] / worst["parameters"], "ranks": ranks}


def _memory_table(results: dict[str, dict[str, Any]], title: str) -> Table:
    kind = next(iter(results.values()))["memory_kind"]
    table = Table(title=f"peak memory so far, MiB per rank: {title}; {kind}", title_justify="left")
    table.add_column("engine")
    for point in (*MEMORY_POINTS, "bytes/param", "parameter sum"):
        table.add_column(point, justify="right")
    for engine, result in results.items():
        peaks = [f"{result['peaks'][point] / 2**20:,.0f}" for point in MEMORY_POINTS]
        table.add_row(engine, *peaks, f"{result['bytes_per_parameter']:.1f}", f"{result['parameter_sum']:.6f}")
    return table
