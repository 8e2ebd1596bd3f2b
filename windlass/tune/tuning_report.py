"""Report of a search: a line for each trial while it runs, then a table and a picture of all trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from windlass.base.figure_file import write_figure
from windlass.base.log import logger
from windlass.config.batch_sizes import ACCUMULATION, MICRO, TRAIN
from windlass.tune.trial_record import TrialRecord, TrialStatus
from windlass.tune.tuning_run import TuningOutcome

_COLORS = {TrialStatus.MEASURED: "#1f4e79", TrialStatus.SLOW: "#a9c4de", TrialStatus.OVER: "#c0504d"}


def trial_line(record: TrialRecord) -> str:
    """Return one line for a trial that has ended."""
    parts = [f"{record.candidate.name}: {record.status}"]
    if record.measured:
        parts.append(f"{record.step_s * 1000:,.1f} ms a step, {record.throughput:,.2f} samples/s")
    if record.error:
        parts.append(record.error)
    parts += [f"left a process behind, which was ended: {line}" for line in record.left_behind]
    return "; ".join(parts)


def trials_table(outcome: TuningOutcome, metric: str = "throughput") -> Table:
    """Return a table of all trials that were run, the best first."""
    ran = [record for record in outcome.records if record.status is not TrialStatus.DISCARDED]
    ran.sort(key=lambda record: (not record.counts, -record.score(metric) if record.measured else 0.0))
    title = f"{len(ran)} of {outcome.candidates} configurations were run in {outcome.seconds:,.0f} s"
    table = Table(title=title, title_justify="left")
    for name in ("configuration", "batch", "ms a step", "samples/s", "memory, MiB", "predicted", "s", "result"):
        is_text = name in ("configuration", "result")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for record in ran:
        measured = record.measured
        sizes = [record.candidate.get(key) or measured.get(name) for key, name in _BATCH]
        batch = " x ".join(str(size) for size in sizes) if all(sizes) else ""
        figures = ["", "", ""]
        if measured:
            peak = measured["peak_device"] or measured["peak_host"]
            figures = [f"{record.step_s * 1000:,.1f}", f"{record.throughput:,.2f}", f"{peak / 2**20:,.0f}"]
        predicted = f"{record.predicted_bytes / 2**20:,.0f}" if record.predicted_bytes is not None else ""
        is_best = outcome.best is not None and record.candidate == outcome.best.candidate
        result = "best" if is_best else record.error or str(record.status)
        table.add_row(
            *(record.candidate.name, batch, *figures, predicted, f"{record.seconds:,.1f}", result),
            style="bold" if is_best else None,
        )
    return table


_BATCH = ((MICRO, "micro"), (ACCUMULATION, "accumulation"), (TRAIN, "train_batch"))


def summary_lines(outcome: TuningOutcome) -> list[str]:
    """Return lines about facts that the table lacks, e.g. configurations that were not run, or an interruption."""
    lines = []
    discarded = [record for record in outcome.records if record.status is TrialStatus.DISCARDED]
    if discarded:
        lines.append(
            f"configurations not run: {len(discarded)}; the first, {discarded[0].candidate.name}: {discarded[0].error}"
        )
    if outcome.refused:
        name, reason = next(iter(outcome.refused.items()))
        more = "; and so on" if len(outcome.refused) > 1 else ""
        lines.append(f"invalid configurations, left out: {len(outcome.refused)}; {name}: {reason}{more}")
    if outcome.forecast.problem:
        known = len(outcome.forecast.device_bytes)
        lines.append(f"memory was predicted for only {known} configurations: {outcome.forecast.problem}")
    lines += [
        f"{record.candidate.name} left a process behind, which was ended: {line}"
        for record in outcome.records
        for line in record.left_behind
    ]
    if outcome.interrupted_by is not None:
        lines.append(
            "interrupted: the best so far is written" if outcome.best else "interrupted before a trial succeeded"
        )
    return lines


def as_json(outcome: TuningOutcome) -> dict[str, Any]:
    """Return the outcome as plain data."""
    best = outcome.best
    return {
        "best": best.candidate.name if best is not None else None,
        "config": outcome.config,
        "step_s": best.step_s if best is not None else None,
        "throughput": best.throughput if best is not None else None,
        "candidates": outcome.candidates,
        "seconds": outcome.seconds,
        "interrupted": outcome.interrupted_by is not None,
        "trials": [record.as_json() for record in outcome.records],
    }


def draw_trials(outcome: TuningOutcome, path: Path) -> bool:
    """Write a PNG with the throughput of each measured trial. Return False if none was measured, or, with a line in the
    log, if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no picture: matplotlib is not installed (pip install 'windlass[plot]')")
        return False
    measured = [record for record in outcome.records if record.measured and record.status in _COLORS]
    if not measured:
        return False
    figure = Figure(figsize=(9.0, 0.26 * len(measured) + 1.6), dpi=140, layout="constrained")
    axes = figure.subplots()
    measured.sort(key=lambda record: -record.throughput)
    for status, color in _COLORS.items():
        chosen = [record for record in measured if record.status is status]
        names = [record.candidate.name for record in chosen]
        bars = axes.barh(names, [record.throughput for record in chosen], color=color, label=str(status))
        axes.bar_label(bars, fmt="%.4g", fontsize=7, padding=2)
    names = [record.candidate.name for record in measured]
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set(xlabel="samples/s", title=f"{len(measured)} measured of {outcome.candidates} configurations")
    axes.margins(x=0.12)
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=7, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)
    return True
