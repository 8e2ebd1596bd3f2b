"""Tables and the stacked picture of a memory plan."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from windlass.base.figure_file import write_figure
from windlass.base.log import logger
from windlass.plan.choose_config import Choice, RefusedRung
from windlass.plan.memory_plan import DISK, MemoryPlan
from windlass.plan.rank_limits import PLACES, RankLimits


def format_size(nbytes: int) -> str:
    """Format bytes in MiB below 10 GiB, else in GiB."""
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes < 10 << 30 else f"{nbytes / 2**30:,.1f} GiB"


def places_of(plan: MemoryPlan) -> list[str]:
    """Return the places (device, host, disk) in which a plan uses memory."""
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
    """Return one line with the peak of each place (device, host, disk), its limit, and the moment of the peak."""
    parts = []
    for place in places_of(plan):
        most = limits.of(place)
        against = f" of {format_size(most)}" if most is not None else ""
        parts.append(f"{place} {format_size(plan.peak(place))}{against} (in {plan.peak_moment(place)})")
    return "peak of a rank: " + ", ".join(parts)


def missing_line(missing: dict[str, int]) -> str:
    """Return one line with the bytes by which each limit is exceeded."""
    return f"missing: {_amounts(missing)}"


def _amounts(missing: dict[str, int]) -> str:
    names = {place: "disk space" if place == DISK else f"{place} memory" for place in missing}
    return ", ".join(f"{format_size(nbytes)} of {names[place]}" for place, nbytes in missing.items())


def ladder_table(choice: Choice) -> Table:
    """Return a table with a row for each configuration of the ladder that was planned or refused.

    The ladder goes from the fastest configuration to the one that needs the least memory.
    """
    table = Table(title="from the fastest to the smallest", title_justify="left")
    for name in ("configuration", *PLACES, "result"):
        table.add_column(name, justify="right" if name in PLACES else "left")
    reasons = _reasons(choice)
    for one in choice.walked:
        if isinstance(one, RefusedRung):
            table.add_row(str(one.rung), *[""] * len(PLACES), f"refused, reason {reasons[one.problem]}")
            continue
        peaks = [format_size(one.plan.peak(place)) if one.plan.kinds(place) else "" for place in PLACES]
        table.add_row(str(one.rung), *peaks, "fits" if one.fits else missing_line(one.missing))
    return table


def refusal_lines(choice: Choice) -> list[str]:
    """Return one line for each reason for which `initialize` refuses configurations, with the reason's number in
    `ladder_table`.
    """
    return [f"reason {number}: {problem}" for problem, number in _reasons(choice).items()]


def _reasons(choice: Choice) -> dict[str, int]:
    problems = dict.fromkeys(one.problem for one in choice.refused)
    return {problem: number for number, problem in enumerate(problems, 1)}


def choice_line(choice: Choice, *, may_use_nvme: bool) -> str:
    """Return one line with the chosen configuration and the reason for it. If none fits, the line names the one that
    lacks the fewest bytes, and remedies.

    Args:
        may_use_nvme: True if configurations with NVMe were tried.
    """
    if choice.chosen is None:
        others = ["more ranks", "a smaller micro-batch", "shorter samples", *([] if may_use_nvme else ["--nvme"])]
        return (
            f"no configuration fits; the nearest is {choice.nearest.rung}: {missing_line(choice.nearest.missing)}; use "
            f"{', '.join(others[:-1])} or {others[-1]}"
        )
    if len(choice.walked) == 1:
        return f"chosen: {choice.chosen.rung}; the fastest one fits"
    tried = choice.tried
    before = f"; {tried[-2].rung} lacks {_amounts(tried[-2].missing)}" if len(tried) > 1 else ""
    return f"chosen: {choice.chosen.rung}; the first one that fits{before}"


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
