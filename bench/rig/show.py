"""Tables of a measurement, and its JSON."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from rich.table import Table

from rig.floor import EXPLANATION
from rig.measure import EQUAL_LOSS, Measured, Result
from rig.targets import AGAINST, memory_target, missed, speed_target


def equality_line(measured: Measured) -> str:
    """Return a sentence that states whether all engines that train one model had the same losses."""
    compared = {name: r for name, r in measured.results.items() if r.loss_apart is not None}
    if measured.reference is None or len(compared) < 2:
        return "losses: nothing to compare (fewer than two engines that train one model)"
    furthest = max(compared.values(), key=lambda r: r.loss_apart or 0.0)
    steps = max(len(r.first_losses) + len(r.losses) for r in compared.values())
    outcome = "equal" if not measured.unequal else f"NOT equal ({', '.join(measured.unequal)})"
    return (
        f"losses of {len(compared)} engines over {steps} steps: {outcome} to {EQUAL_LOSS:g} of "
        f"{measured.reference}'s; the largest difference is {furthest.loss_apart:.1e}, of {furthest.engine}"
    )


def table(measured: Measured) -> Table:
    """Return a table of speed and memory of every engine, compared with the targets."""
    results, size = measured.results, measured.size
    parameters = next(iter(results.values())).parameters
    actual = Table(
        title=f"{parameters / 1e6:.1f}M-parameter Llama in fp32, {measured.ranks} ranks x 1 thread, "
        f"{size.batch} x {size.length} tokens each",
        title_justify="left",
    )
    actual.add_column("engine", no_wrap=True)
    for column in (
        "ms",
        "min",
        "none ms",
        "x none",
        "spread",
        "target",
        "",
        "floor ms",
        "of floor",
        "B/param",
        "target",
        "",
    ):
        actual.add_column(column, justify="right", no_wrap=True)
    for name, result in results.items():
        if result.failure:
            actual.add_row(name, result.failure if len(result.failure) < 30 else "failed, see below")
            continue
        actual.add_row(
            name,
            *_time_cells(result, speed_target(measured, name)),
            *_memory_cells(result, memory_target(measured, name)),
        )
    return actual


def _time_cells(result: Result, target: float | None) -> list[str]:
    if not result.rounds:
        return [""] * 9
    return [
        f"{result.median * 1e3:.0f}",
        f"{min(result.steps) * 1e3:.0f}",
        f"{result.base_median * 1e3:.0f}",
        f"{result.ratio:.3f}",
        f"{min(result.ratios):.2f}-{max(result.ratios):.2f}",
        *_against(result.ratio, target, 3),
        f"{result.floor * 1e3:.0f}" if result.floor else "",
        f"{result.share_of_floor:.0%}" if result.share_of_floor else "",
    ]


def _memory_cells(result: Result, target: float | None) -> list[str]:
    return [f"{result.bytes_per_parameter:.1f}", *_against(result.bytes_per_parameter, target, 1)]


def _against(value: float, target: float | None, digits: int) -> list[str]:
    if target is None:
        return ["", ""]
    return [f"<= {target:.{digits}f}", "yes" if value <= target else "NO"]


def notes(measured: Measured) -> list[str]:
    """Return notes for readers of the table: method, peak rates, missed targets, failures."""
    lines = [
        "x none: median over rounds of the round's median step over that of `none` in the same round; "
        "a step's time is its slowest rank's",
        f"B/param: peak {next(iter(measured.results.values())).memory_kind} of the rank that takes most, above those "
        "after importing torch and transformers",
    ]
    lines += [
        f"roofs of a rank while all work ({', '.join(group)}): memory {roofs.memory / 1e9:.1f} GB/s, fused AdamW "
        f"{roofs.adam / 1e9:.1f} GB/s"
        for group, roofs in zip(measured.groups, measured.roofs, strict=True)
    ]
    lines += [
        f"{name}: {result.rival_ratio:.3f} x {AGAINST[name][0]} in the same rounds"
        for name, result in measured.results.items()
        if result.rival_ratio is not None
    ]
    lines += [f"failed: {name}: {r.failure}" for name, r in measured.results.items() if r.failure]
    lines += [f"target missed: {line}" for line in missed(measured)]
    return lines


def plain(measured: Measured) -> dict[str, Any]:
    """Return the measurement as plain data."""
    results = {}
    for name, result in measured.results.items():
        item = asdict(result)
        if result.rounds:
            item |= {
                "median_ms": result.median * 1e3,
                "min_ms": min(result.steps) * 1e3,
                "ratio": result.ratio,
                "ratios": result.ratios,
                "rival_ratio": result.rival_ratio,
                "speed_target": speed_target(measured, name),
                "share_of_floor": result.share_of_floor,
                "time_outside_steps": sum(result.between) / (sum(result.between) + sum(result.steps)),
                "median_compute_ms": statistics.median(result.compute) * 1e3,
            }
        if result.memory:
            item |= {"bytes_per_parameter": result.bytes_per_parameter, "memory_target": memory_target(measured, name)}
        results[name] = item
    return {
        "size": asdict(measured.size),
        "ranks": measured.ranks,
        "reference": measured.reference,
        "losses": equality_line(measured),
        "groups": measured.groups,
        "roofs": [asdict(roofs) for roofs in measured.roofs],
        "floor": EXPLANATION,
        "missed": missed(measured),
        "results": results,
    }
