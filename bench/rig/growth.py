"""Figure of step time and memory against the number of parameters (on two ranks) and of ranks (at one size)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rig.job import Size
from rig.measure import Effort, Measured, Say, measure
from rig.plan import BASE

RANKS = (1, 2, 4)
ENGINES = (BASE, "ddp", "fsdp3", "windlass-0", "windlass-1", "windlass-2", "windlass-3")
_Value = Callable[[Measured, str], float]
_COLORS = ("#888888", "#e09f3e", "#9e2a2b", "#a9c4de", "#6b9ac4", "#34699a", "#0b2545", "#588157", "#7b2d8b")


def sizes_up_to(size: Size) -> list[Size]:
    """Return sizes of a third and two thirds of the width and depth of `size`, and `size` itself."""
    return [
        replace(size, hidden=max(64, size.hidden * part // 3 // 64 * 64), layers=max(1, size.layers * part // 3))
        for part in (1, 2, 3)
    ]


def grow(
    engines: Sequence[str], sizes: Sequence[Size], ranks: Sequence[int], effort: Effort, say: Say
) -> tuple[list[Measured], list[Measured]]:
    """Measure every size on two ranks, and the middle size on every number of ranks."""
    by_size = []
    for size in sizes:
        say(f"hidden {size.hidden}, {size.layers} layers, 2 ranks")
        by_size.append(measure(engines, size, 2, effort, say))
    middle = len(sizes) // 2
    by_ranks = []
    for count in ranks:
        say(f"hidden {sizes[middle].hidden}, {sizes[middle].layers} layers, {count} ranks")
        by_ranks.append(by_size[middle] if count == 2 else measure(engines, sizes[middle], count, effort, say))
    return by_size, by_ranks


def draw(by_size: list[Measured], by_ranks: list[Measured], path: Path) -> None:
    """Plot four panels: time and memory over parameters, and over ranks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), dpi=130, layout="constrained")
    panels: list[Any] = list(figure.subplots(2, 2).flat)
    millions = [m.results[BASE].parameters / 1e6 for m in by_size]
    counts = [float(m.ranks) for m in by_ranks]
    _lines(panels[0], by_size, millions, lambda m, e: m.results[e].median * 1e3, skip=())
    panels[0].set(title="step time, 2 ranks", xlabel="million parameters", ylabel="ms")
    _lines(panels[1], by_size, millions, lambda m, e: m.results[e].bytes_per_parameter, skip=(BASE,))
    panels[1].set(title="peak memory of a rank, 2 ranks", xlabel="million parameters", ylabel="bytes a parameter")
    _lines(panels[2], by_ranks, counts, lambda m, e: m.results[e].ratio, skip=(BASE,))
    panels[2].set(title="step time over the compute alone", xlabel="ranks", ylabel="x none", xticks=counts)
    _lines(panels[3], by_ranks, counts, lambda m, e: m.results[e].bytes_per_parameter, skip=(BASE,))
    panels[3].set(title="peak memory of a rank", xlabel="ranks", ylabel="bytes a parameter", xticks=counts)
    for panel in panels:
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    size = by_ranks[0].size
    figure.suptitle(f"growth with parameters, and with ranks (hidden {size.hidden}, {size.layers} layers)")
    FigureCanvasAgg(figure).print_png(str(path))


def _lines(
    panel: Any,
    series: list[Measured],
    places: list[float],
    value: _Value,
    skip: Sequence[str],
) -> None:
    engines = list(series[0].results)
    for engine, color in zip(engines, _COLORS, strict=False):
        known = [(x, value(m, engine)) for x, m in zip(places, series, strict=True) if m.results[engine].rounds]
        if engine not in skip and known:
            xs, ys = zip(*known, strict=True)
            panel.plot(xs, ys, marker="o", markersize=4, linewidth=1.4, label=engine, color=color)
