"""Report of a compression: a table, a picture, and files with the expected and the measured figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from windlass.base.atomic_file import write_atomically
from windlass.compress.budget_choice import BudgetChoice
from windlass.compress.model_directory import write_json

REPORT_JSON, REPORT_MARKDOWN, REPORT_PICTURE = "compression.json", "compression.md", "compression.svg"
_COLORS = {"int8": "#4477aa", "int4": "#66ccee", "int3": "#ccbb44", "int2": "#ee6677", "None": "#bbbbbb"}


@dataclass
class CompressionReport:
    """Contents of the report of one run.

    Attributes:
        figures: lines of the table of both models.
        pruned: lines about pruning.
        choice: formats of a budget; None: one format for all layers.
        notes: other lines.
    """

    figures: list[str]
    before: dict[str, Any]
    after: dict[str, Any]
    settings: dict[str, Any]
    pruned: list[str] = field(default_factory=list)
    choice: BudgetChoice | None = None
    notes: list[str] = field(default_factory=list)

    def write(self, directory: Path) -> None:
        """Write the files of the report into the directory of the model."""
        value: dict[str, Any] = {
            "settings": self.settings,
            "before": self.before,
            "after": self.after,
            "pruned": self.pruned,
            "notes": self.notes,
        }
        if self.choice is not None:
            value["choice"] = {name: one for name, one in asdict(self.choice).items() if name != "formats"}
            write_atomically(directory / REPORT_PICTURE, draw_choice(self.choice))
        write_json(directory / REPORT_JSON, value)
        lines = ["# Compression", "", "```", *self.figures, "```", ""]
        lines += [f"- {line}" for line in (*self.pruned, *self.notes)]
        if self.choice is not None:
            lines += ["", f"![bits of each layer]({REPORT_PICTURE})", "", "```", *choice_lines(self.choice), "```"]
        write_atomically(directory / REPORT_MARKDOWN, "\n".join(lines).rstrip() + "\n")


def choice_lines(choice: BudgetChoice) -> list[str]:
    """Return a table of the chosen formats, with the loss that each group of layers adds."""
    timed = any(one.seconds for one in choice.groups)
    rows = [("layers with one input", "format", "bytes", "loss, bits/byte", *(("us/token",) if timed else ()))]
    for one in choice.groups:
        first, *others = one.names
        name = first + (f" +{len(others)}" if others else "")
        seconds = (f"{1e6 * one.seconds:.1f}",) if timed else ()
        rows.append((name, one.format or "wide", f"{one.nbytes:,}", f"{one.loss:.2e}", *seconds))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if place < 2 else cell.rjust(width)
                 for place, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def draw_choice(choice: BudgetChoice) -> str:
    """Return an SVG with a bar for each group of layers: its width is the size before, its height the ratio of the
    sizes."""
    total = sum(one.wide_bytes for one in choice.groups) or 1
    width, height, top = 900.0, 200.0, 24.0
    bars, x = [], 20.0
    most = max((_bits(one.nbytes, one.wide_bytes) for one in choice.groups), default=1.0) or 1.0
    for one in choice.groups:
        span = (width - 40) * one.wide_bytes / total
        tall = (height - 60) * _bits(one.nbytes, one.wide_bytes) / most
        color = _COLORS.get(str(one.format).partition("_")[0], "#aa3377")
        title = f"{', '.join(one.names)}: {one.format or 'wide'}"
        bars.append(
            f'<rect x="{x:.1f}" y="{height - 30 - tall:.1f}" width="{max(span - 0.5, 0.5):.1f}" height="{tall:.1f}" '
            f'fill="{color}"><title>{title}</title></rect>'
        )
        x += span
    used = list(dict.fromkeys(str(one.format).partition("_")[0] for one in choice.groups))
    legend = [
        f'<rect x="{20 + 90 * place}" y="6" width="10" height="10" fill="{_COLORS.get(name, "#aa3377")}"/>'
        f'<text x="{34 + 90 * place}" y="15" font-size="11">{"wide" if name == "None" else name}</text>'
        for place, name in enumerate(used)
    ]
    caption = (
        f'<text x="20" y="{height - 10}" font-size="11">height: bytes of each group of layers, divided by the bytes '
        "before; width: bytes before; from the first layer to the last</text>"
    )
    body = "\n".join([*legend, *bars, caption])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height + top:.0f}" font-family="sans-serif">\n{body}\n</svg>\n'
    )


def _bits(nbytes: int, wide: int) -> float:
    return nbytes / wide if wide else 0.0


def prune_lines(units: dict[str, tuple[int, int]], layers: Sequence[str], parameters: tuple[int, int]) -> list[str]:
    """Return the lines that describe the removed units."""
    lines = [f"{kind}: {before} -> {after}" for kind, (before, after) in units.items()]
    lines += list(layers)
    lines.append(f"parameters: {parameters[0]:,} -> {parameters[1]:,}")
    return lines
