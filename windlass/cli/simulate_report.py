"""Tables and the picture of a predicted step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from windlass.base.figure_file import write_figure
from windlass.base.log import logger
from windlass.cli.plan_report import format_size
from windlass.simulate.cluster import Cluster
from windlass.simulate.goodput import Goodput
from windlass.simulate.model_states import state_bytes_of_rank, states_fit
from windlass.simulate.step_prediction import KindPrediction, Span, StepPrediction
from windlass.simulate.step_workload import StepWork

_COMPUTE = "compute"
_MOST_LANES = 60
_RANK_COLUMNS = 4


def format_time(seconds: float) -> str:
    """Format seconds in days, hours, minutes, s, ms or us."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.1f} d"
    if seconds >= 7200:
        return f"{seconds / 3600:,.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:,.1f} min"
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} us"


def step_tables(predictions: list[tuple[StepPrediction, Goodput | None, bool]]) -> list[Table]:
    """Return tables with a column for each number of ranks, at most `_RANK_COLUMNS` in one table, so that it
    fits 80 characters. The bool is that of `states_fit`.
    """
    return [
        _step_table(predictions[first : first + _RANK_COLUMNS]) for first in range(0, len(predictions), _RANK_COLUMNS)
    ]


def _step_table(predictions: list[tuple[StepPrediction, Goodput | None, bool]]) -> Table:
    table = Table(title="one step", title_justify="left")
    table.add_column("ranks")
    rows: dict[str, list[str]] = {}
    for one, good, fits in predictions:
        table.add_column(f"{one.world_size:,}", justify="right")
        longest = max(one.waits, key=lambda kind: one.waits[kind], default="")
        cells = {
            "tokens": f"{one.tokens:,}",
            "time": format_time(one.seconds),
            "tokens/s": f"{one.tokens_per_second:,.0f}",
            "TFLOP/s of a rank": f"{one.flops_per_device / 1e12:,.3g}",
            "MFU": f"{one.mfu:.1%}",
            "compute": f"{one.compute_seconds / one.seconds:.1%}",
            "waits": f"{sum(one.waits.values()) / one.seconds:.1%}",
            "longest wait": f"{longest} {one.waits[longest] / one.seconds:.1%}" if longest else "",
            "model states": "fit" if fits else "do not fit",
        }
        if good is not None:
            cells["goodput"] = f"{good.goodput:.1%}"
        for name, cell in cells.items():
            rows.setdefault(name, []).append(cell)
    for name, row in rows.items():
        table.add_row(name, *row)
    return table


def wait_table(one: StepPrediction) -> Table:
    """Return a table of the times of compute, waits and busy links, and of the bytes sent over links and received by a
    rank.
    """
    table = Table(title=f"{one.world_size:,} ranks: where the step waits, and the bytes of links", title_justify="left")
    for name in ("", "time", "of the step", "bytes"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row(_COMPUTE, format_time(one.compute_seconds), f"{one.compute_seconds / one.seconds:.1%}", "")
    for kind, seconds in sorted(one.waits.items(), key=lambda item: -item[1]):
        table.add_row(f"waits for {kind}", format_time(seconds), f"{seconds / one.seconds:.1%}", "")
    for kind, nbytes in sorted(one.link_bytes.items()):
        busy = one.link_busy.get(kind, 0.0)
        table.add_row(f"link {kind}", format_time(busy * one.seconds), f"{busy:.1%}", format_size(int(nbytes)))
    for axis, operations in sorted(one.moved[0].items()):
        for operation, nbytes in operations.items():
            table.add_row(f"received along {axis}: {operation}", "", "", format_size(nbytes))
    return table


def kinds_table(kinds: list[KindPrediction]) -> Table:
    """Return a table of the time and traffic of each kind of optimizer step, and of the average in a long run."""
    table = Table(title="kinds of steps of the optimizer", title_justify="left")
    for name in ("gradients", "such as step", "of a long run", "time", "bytes received"):
        table.add_column(name, justify="left" if name == "gradients" else "right")
    for one in kinds:
        share = f"{one.share:.1%}" if one.share else "only at its start"
        table.add_row(one.kind, f"{one.step:,}", share, format_time(one.seconds), format_size(one.received))
    seconds = sum(one.share * one.seconds for one in kinds)
    received = sum(one.share * one.received for one in kinds)
    table.add_row("average", "", "100.0%", format_time(seconds), format_size(int(received)))
    return table


def fit_line(work: StepWork, cluster: Cluster) -> str:
    """Return one line that compares the size of a rank's model states on its device with the device's memory."""
    fits, held = states_fit(work, cluster), format_size(state_bytes_of_rank(work, cluster))
    advice = (
        "activations not counted; windlass plan counts them"
        if fits
        else "take more ranks, a higher ZeRO stage or offloading; windlass plan --choose tries these in turn"
    )
    return (
        f"parameters, gradients and states of a rank on its device: {held} {'of' if fits else 'do not fit into'} "
        f"{format_size(cluster.device.memory)} ({advice})"
    )


def goodput_line(good: Goodput) -> str:
    """Return one line with the time between failures, the time between checkpoints, and the goodput."""
    return (
        f"a failure every {format_time(good.mtbf)}; a checkpoint every {format_time(good.interval)} (Young "
        f"{format_time(good.young)}, Daly {format_time(good.daly)}): goodput {good.goodput:.1%}"
    )


def draw_timeline(one: StepPrediction, path: Path) -> bool:
    """Write the timeline of the first 60 streams and links as a PNG. Without matplotlib, log one line, return False."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no picture: matplotlib is not installed (pip install 'windlass[plot]')")
        return False
    lanes: dict[str, list[Span]] = {}
    for span in one.spans:
        lanes.setdefault(f"{span.process}: {span.lane}", []).append(span)
    shown = list(lanes.items())[:_MOST_LANES]
    figure = Figure(figsize=(12.0, 1.2 + 0.28 * len(shown)), dpi=140, layout="constrained")
    axes: Any = figure.subplots()
    for row, (name, spans) in enumerate(shown):
        color = "tab:blue" if name.endswith(_COMPUTE) else "tab:orange" if name.startswith("links") else "tab:green"
        axes.broken_barh([(s.start, s.stop - s.start) for s in spans], (row - 0.4, 0.8), facecolors=color)
    axes.set_yticks(range(len(shown)), [name for name, _ in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="seconds", title=f"{one.world_size:,} ranks, {format_time(one.seconds)}, MFU {one.mfu:.1%}")
    axes.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)
    return True
