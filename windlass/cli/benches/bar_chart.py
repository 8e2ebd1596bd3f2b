"""Bar charts with one panel for each quantity. The bars are horizontal if a panel has more than 8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from windlass.base.figure_file import write_figure
from windlass.base.log import logger

_WINDLASS_COLOR, _BASELINE_COLOR = "#1f4e79", "#a9c4de"
_MAX_VERTICAL_BARS = 8  # more bars than this leave no room for their names below them


@dataclass(frozen=True)
class BarPanel:
    """Bars of one quantity: a value for each label."""

    title: str
    unit: str
    values: Mapping[str, float]


def draw_bars(panels: list[BarPanel], path: Path, title: str) -> bool:
    """Write a PNG to `path`. Return False, and log one line, if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no picture: matplotlib is not installed (pip install 'windlass[plot]')")
        return False
    many = max(len(panel.values) for panel in panels) > _MAX_VERTICAL_BARS
    height = 0.24 * max(len(panel.values) for panel in panels) + 1.2 if many else 4.0
    figure = Figure(figsize=(4.6 * len(panels) + (2.0 if many else 0.0), height), dpi=140, layout="constrained")
    everything = figure.subplots(1, len(panels), sharey=many, squeeze=False)[0]
    for axes, panel in zip(everything, panels, strict=True):
        labels, values = list(panel.values), list(panel.values.values())
        colors = [_BASELINE_COLOR if _is_baseline(label) else _WINDLASS_COLOR for label in labels]
        bars = (axes.barh if many else axes.bar)(labels, values, color=colors)
        axes.bar_label(bars, fmt="%.4g", fontsize=8, padding=2)
        axes.set(title=panel.title, **{"xlabel" if many else "ylabel": panel.unit})
        axes.tick_params(axis="y" if many else "x", labelrotation=0 if many else 30, labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if many:
            axes.margins(x=0.15)
    if many:
        everything[0].invert_yaxis()  # the first bar at the top, in all panels (they share the y axis)
    figure.suptitle(title)
    write_figure(figure, path)
    return True


def _is_baseline(label: str) -> bool:
    return label in ("ddp", "zro", "fsdp2", "fsdp3") or label.startswith(("DeepSpeed", "torch", "DCP"))
