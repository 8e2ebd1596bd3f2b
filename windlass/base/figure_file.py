"""Figures of matplotlib as PNG files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from windlass.base.atomic_file import make_directory, write_output


def write_figure(figure: Any, path: Path) -> None:
    """Write a `matplotlib.figure.Figure` as a PNG (see `write_output`), and create its folder. No display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    make_directory(path.parent)
    drawn = io.BytesIO()
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(drawn)
    write_output(path, drawn.getvalue())
