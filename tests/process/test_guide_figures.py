"""Test that the guide on parallelism shows each figure that the script draws."""

from __future__ import annotations

from pathlib import Path

from tests.unit.test_guides import ROOT, drawer


def test_layout_figures_can_be_drawn(tmp_path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    text = (ROOT / "docs" / "guides" / "parallel.md").read_text()
    for name, figure in drawer().make_figures():
        FigureCanvasAgg(figure).print_png(str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 10_000
        assert f"(images/{name})" in text and (ROOT / "docs" / "guides" / "images" / name).is_file()
