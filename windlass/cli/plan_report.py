"""Tables and the stacked picture of a memory plan."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from windlass.base.figure_file import write_figure
from windlass.base.log import logger
from windlass.plan.choose_config import PLACES, RefusedRung, TriedRung
from windlass.plan.memory_plan import MemoryPlan
from windlass.plan.rank_limits import RankLimits


def format_size(nbytes: int) -> str:
    """Format bytes in MiB below 10 GiB, else in GiB."""
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes < 10 << 30 else f"{nbytes / 2**30:,.1f} GiB"


def places_of(plan: MemoryPlan) -> list[str]:
    """Return the places that a plan uses."""
    return [place for place in PLACES if plan.kinds(place)]


def memory_table(plan: MemoryPlan) -> Table:
    """Return a table with a row for each kind of memory and a column for each moment."""
    ranks = "one rank" if plan.world_size == 1 else f"each of {plan.world_size:,} ranks"
    work = f"micro-batch {plan.micro_batch} x {plan.length:,} tokens"
    unit, width = ("MiB", 1 << 20) if max(map(plan.peak, PLACES)) < 10 << 30 else ("GiB", 1 << 30)
    title = f"{unit} of {ranks}: {plan.parameters:,} parameters, {work}"
    table = Table(title=title, title_justify="left")
    table.add_column("", min_width=22)
    for moment in plan.moments:
        table.add_column(moment, justify="right", no_wrap=True)
    for place in places_of(plan):
        for kind in plan.kinds(place):
            amounts = [one.of(place).get(kind, 0) for one in plan.moments.values()]
            table.add_row(f"{place}: {kind}", *(f"{n / width:,.1f}" if n else "" for n in amounts))
        totals = [one.total(place) for one in plan.moments.values()]
        table.add_row(f"{place}: total", *(f"{n / width:,.1f}" for n in totals), style="bold", end_section=True)
    return table


def peak_line(plan: MemoryPlan, limits: RankLimits) -> str:
    """Return one line with the peak of each kind of memory, the moment of the peak and the limit."""
    parts = []
    for place in places_of(plan):
        most = limits.of(place)
        against = f" of {format_size(most)}" if most is not None else ""
        parts.append(f"{place} {format_size(plan.peak(place))}{against} (in {plan.peak_moment(place)})")
    return "peak of a rank: " + ", ".join(parts)


def missing_line(missing: dict[str, int]) -> str:
    """Return one line with the bytes by which each limit is exceeded."""
    return "missing: " + ", ".join(f"{format_size(nbytes)} of {place} memory" for place, nbytes in missing.items())


def ladder_table(walked: list[TriedRung | RefusedRung]) -> Table:
    """Return a table with a row for each rung that was planned or refused, from the fastest to the smallest."""
    table = Table(title="from the fastest to the smallest", title_justify="left")
    for name in ("configuration", *PLACES, ""):
        table.add_column(name, justify="right" if name in PLACES else "left")
    for one in walked:
        if isinstance(one, RefusedRung):
            table.add_row(str(one.rung), *[""] * len(PLACES), f"refused: {one.problem}")
            continue
        peaks = [format_size(one.plan.peak(place)) if one.plan.kinds(place) else "" for place in PLACES]
        table.add_row(str(one.rung), *peaks, "fits" if one.fits else missing_line(one.missing))
    return table


def draw_memory(plan: MemoryPlan, path: Path, limits: RankLimits) -> bool:
    """Write a PNG with a stacked bar for each moment. Return False, and log one line, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no picture: matplotlib is not installed (pip install 'windlass[plot]')")
        return False
    places = places_of(plan)
    figure = Figure(figsize=(7.0 * len(places), 4.6), dpi=140, layout="constrained")
    panels = figure.subplots(1, len(places), squeeze=False)[0]
    moments = list(plan.moments)
    for axes, place in zip(panels, places, strict=True):
        below = [0.0] * len(moments)
        for kind in plan.kinds(place):
            heights = [plan.moments[moment].of(place).get(kind, 0) / 2**30 for moment in moments]
            axes.bar(moments, heights, bottom=below, label=kind)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        most = limits.of(place)
        if most is not None:
            axes.axhline(most / 2**30, color="black", linestyle="--", linewidth=1, label="limit")
        axes.set(title=place, ylabel="GiB")
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)
    return True
