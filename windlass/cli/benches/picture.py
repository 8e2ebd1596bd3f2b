"""Draws bars side by side: one panel a quantity."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.base.log import logger

_OURS, _THEIRS = "#1f4e79", "#a9c4de"


@dataclass(frozen=True)
class Panel:
    """Bars of one quantity by label, and a horizontal line where there is something to compare with."""

    title: str
    unit: str
    values: Mapping[str, float]


def draw(panels: list[Panel], path: Path, title: str) -> bool:
    """Write a PNG; False, after one line that says so, where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no picture: matplotlib is not installed (pip install 'windlass[plot]')")
        return False
    figure = Figure(figsize=(4.6 * len(panels), 4), dpi=140, layout="constrained")
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        labels = list(panel.values)
        colors = [_THEIRS if label in ("ddp", "zro", "fsdp2", "fsdp3") else _OURS for label in labels]
        bars = axes.bar(labels, list(panel.values.values()), color=colors)
        axes.bar_label(bars, fmt="%.4g", fontsize=8)
        axes.set(title=panel.title, ylabel=panel.unit)
        axes.tick_params(axis="x", labelrotation=30, labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(str(partial))
    os.replace(partial, path)
    return True
