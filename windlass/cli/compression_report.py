"""Report of a compression: a table, a picture, and files with the expected and the measured figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from windlass.base.atomic_file import write_atomically
from windlass.cli.compression_picture import LayerSize, draw_compression
from windlass.compress.budget_choice import BudgetChoice
from windlass.compress.model_directory import write_json

REPORT_JSON, REPORT_MARKDOWN, REPORT_PICTURE = "compression.json", "compression.md", "compression.svg"


@dataclass
class CompressionReport:
    """Contents of the report of one run.

    Attributes:
        figures: lines of the table that compares the model before and after compression.
        pruned: lines about pruning.
        layers: sizes of all matrices.
        choice: formats chosen for a budget; None: no budget.
        notes: other lines.
    """

    figures: list[str]
    before: dict[str, Any]
    after: dict[str, Any]
    settings: dict[str, Any]
    pruned: list[str] = field(default_factory=list)
    layers: list[LayerSize] = field(default_factory=list)
    choice: BudgetChoice | None = None
    notes: list[str] = field(default_factory=list)

    def write(self, directory: Path) -> None:
        """Write the files of the report into the directory of the model."""
        value: dict[str, Any] = {
            "settings": self.settings,
            "before": self.before,
            "after": self.after,
            "layers": [{**asdict(one), "names": list(one.names)} for one in self.layers],
            "pruned": self.pruned,
            "notes": self.notes,
        }
        if self.choice is not None:
            value["choice"] = {name: one for name, one in asdict(self.choice).items() if name != "formats"}
        picture = draw_compression(self.before, self.after, self.layers, self.choice)
        write_atomically(directory / REPORT_PICTURE, picture)
        write_json(directory / REPORT_JSON, value)
        lines = ["# Compression", "", "```", *self.figures, "```", ""]
        lines += [f"- {line}" for line in (*self.pruned, *self.notes)]
        table = choice_lines(self.choice) if self.choice is not None else layer_lines(self.layers)
        lines += ["", f"![figures, and bytes of each layer]({REPORT_PICTURE})", "", "```", *table, "```"]
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
    return _aligned(rows)


def layer_lines(layers: Sequence[LayerSize]) -> list[str]:
    """Return a table of the formats and bytes of layers."""
    rows = [("layer", "format", "bytes before", "after")]
    rows += [(one.names[0], one.format or "wide", f"{one.wide_bytes:,}", f"{one.nbytes:,}") for one in layers]
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if place < 2 else cell.rjust(width)
                 for place, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def prune_lines(
    units: dict[str, tuple[int, int]],
    layers: Sequence[str],
    parameters: tuple[int, int],
    of_each_key_head: Mapping[str, tuple[int, int]],
) -> list[str]:
    """Return the lines that describe the removed units."""
    lines = [f"{kind}: {before} -> {after}" for kind, (before, after) in units.items()]
    for place, kind in enumerate(units):
        if kind in of_each_key_head:
            lines[place] += f" in the model, {' -> '.join(map(str, of_each_key_head[kind]))} for each key head"
    lines += list(layers)
    lines.append(f"parameters: {parameters[0]:,} -> {parameters[1]:,}")
    return lines
