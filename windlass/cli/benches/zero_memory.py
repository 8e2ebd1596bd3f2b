"""`windlass bench zero-memory`: how much memory rivals and stages take, and that they train the same parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from windlass.cli.benches.facts import write_result
from windlass.cli.benches.picture import Panel, draw
from windlass.cli.benches.rank import POINTS
from windlass.cli.benches.ranks import measure
from windlass.cli.benches.screen import screen
from windlass.cli.benches.trainee import check_name
from windlass.cli.benches.verdicts import EQUAL_SUMS, equal, verdict
from windlass.cli.benches.work import ZeroMemoryWork

ENGINES = ("ddp", "zro", "fsdp2", "fsdp3", "windlass-0", "windlass-1", "windlass-2", "windlass-3")
_TUTORIAL = ("windlass-3", "windlass-2", "windlass-1", "windlass-0")  # least memory first


def run(engines: list[str], nproc: int, width: int, depth: int, batch: int, steps: int, out: Path) -> bool:
    """Measure, print, write `zero-memory.json` and `.png` in `out`; whether all parameter sums are equal."""
    for engine in engines:
        check_name(engine)
    console = screen()
    results: dict[str, dict[str, Any]] = {}
    for engine in engines:
        console.print(f"{engine}: {nproc} fresh ranks", style="dim")
        ranks = measure(ZeroMemoryWork(engine, width, depth, batch, steps), nproc)
        results[engine] = _worst(ranks)
    sums = {engine: result["parameter_sum"] for engine, result in results.items()}
    same = equal(sums, EQUAL_SUMS)
    console.print(_table(results, f"{depth} x Linear({width}), {nproc} ranks"))
    verdicts = [
        f"parameter sums after {steps} steps: {'equal' if same else 'NOT equal'} (to {EQUAL_SUMS:g} of the sum)"
    ]
    peaks = {engine: result["bytes_per_parameter"] for engine, result in results.items()}
    expected = [engine for engine in _TUTORIAL if engine in peaks]
    if len(expected) > 1:
        verdicts.append(verdict("peak memory (bytes a parameter)", {e: peaks[e] for e in expected}, expected, 0.03))
    for line in verdicts:
        console.print(line, soft_wrap=True)
    result = {"bench": "zero-memory", "ranks": nproc, "width": width, "depth": depth, "batch": batch, "steps": steps}
    written = write_result(out / "zero-memory.json", {**result, "engines": results, "verdicts": verdicts})
    drawn = draw(
        [Panel("peak memory of a rank", "bytes a parameter", peaks)],
        out / "zero-memory.png",
        f"{depth} x Linear({width}), {nproc} ranks",
    )
    console.print(f"written: {written}{' and its .png' if drawn else ''}", soft_wrap=True)
    return same


def _worst(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The rank that takes most speaks for all."""
    worst = max(ranks, key=lambda rank: int(rank["peaks"][POINTS[-1]]))
    return {**worst, "bytes_per_parameter": worst["peaks"][POINTS[-1]] / worst["parameters"], "ranks": ranks}


def _table(results: dict[str, dict[str, Any]], title: str) -> Table:
    kind = next(iter(results.values()))["memory_kind"]
    table = Table(title=f"most memory so far, MiB a rank: {title}; {kind}", title_justify="left")
    table.add_column("engine")
    for point in (*POINTS, "bytes/param", "parameter sum"):
        table.add_column(point, justify="right")
    for engine, result in results.items():
        peaks = [f"{result['peaks'][point] / 2**20:,.0f}" for point in POINTS]
        table.add_row(engine, *peaks, f"{result['bytes_per_parameter']:.1f}", f"{result['parameter_sum']:.6f}")
    return table
