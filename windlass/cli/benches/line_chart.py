"""Line charts with one panel for each quantity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

from windlass.base.figure_file import write_figure
from windlass.base.log import logger

_COLORS = ("#1f4e79", "#c0651a", "#7a7a7a", "#3c8d40", "#8a3d6b", "#2a9d8f")
_STYLES = ("-", ":", "-.")  # "--" is the style of limits


@dataclass(frozen=True)
class LinePanel:
    """Lines of one quantity. Each line has one value for each number in `at` (positive: the axis is logarithmic).

    Attributes:
        limit: value at which a horizontal line is drawn; None: no line.
    """

    title: str
    unit: str
    at_unit: str
    at: Sequence[float]
    values: Mapping[str, Sequence[float]]
    limit: float | None = None


def draw_lines(panels: Sequence[LinePanel], path: Path, title: str) -> bool:
    """Write a PNG to `path`, with the first 6 lines of each panel. Return False, and log one line, if matplotlib is not
    installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no picture: matplotlib is not installed (pip install 'windlass[plot]')")
        return False
    figure = Figure(figsize=(4.4 * len(panels), 3.8), dpi=140, layout="constrained")
    everything = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(everything, panels, strict=True):
        for (style, color), (label, values) in zip(cycle(product(_STYLES, _COLORS)), panel.values.items()):
            axes.plot(panel.at, values, color=color, linestyle=style, marker="o", markersize=4, label=label)
        if panel.limit is not None:
            axes.axhline(panel.limit, color="#b00020", linewidth=0.8, linestyle="--")
        axes.set(title=panel.title, ylabel=panel.unit, xlabel=panel.at_unit)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(panel.at), [f"{value:g}" for value in panel.at])
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    everything[0].legend(frameon=False)
    figure.suptitle(title)
    write_figure(figure, path)
    return True
