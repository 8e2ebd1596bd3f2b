"""Draw the pictures of docs/guides/parallel.md and write its generated table, both computed from formulas.

`python tools/draw_parallel_guide.py` writes both; with `--check` it only reports whether the table is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from parallel_layouts import (
    GPUS_PER_NODE,
    LAYOUTS,
    MODEL_TITLES,
    LayoutBytes,
    bytes_by_sequence_method,
    format_gb,
    layout_bytes,
    layout_table,
)

from windlass.parallel.model_shape import PRESETS
from windlass.parallel.pipeline.pipeline_action import ActionKind
from windlass.parallel.pipeline.pipeline_schedules import SCHEDULES, build_schedule
from windlass.parallel.pipeline.schedule_simulation import ActionCosts, compute_bubble_fraction, simulate_schedule

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "parallel.md"
AXIS_COLOURS = {"data": "#34699a", "tp": "#e09f3e", "pp": "#9e2a2b", "sp": "#588157", "ep": "#7b2d8b"}
RANK_COLOURS = ("#34699a", "#e09f3e", "#588157", "#9e2a2b")
REPLICATED_COLOUR = "#d9d9d9"
Colours = Sequence[Sequence[str]]


def fill_layout_table(text: str) -> str:
    """Return the guide with a new generated table."""
    marks = r"(<!-- generated: layouts -->\n\n).*?(\n\n<!-- end generated -->)"
    return re.sub(marks, lambda match: match[1] + layout_table() + match[2], text, flags=re.DOTALL)


def make_figures() -> Iterator[tuple[str, Any]]:
    """Yield the file name and the figure of each picture."""
    yield "parallel-cuts.png", _draw_shards()
    yield "parallel-bytes.png", _draw_axis_bytes()
    yield "parallel-length.png", _draw_sequence_lengths()
    yield "parallel-schedules.png", _draw_schedules()


def main(arguments: Sequence[str]) -> int:
    """Write the files, or check the table. Return the exit code."""
    text = GUIDE.read_text("utf-8")
    if "--check" in arguments:
        if stale := fill_layout_table(text) != text:
            print(f"{GUIDE} is out of date: run python tools/draw_parallel_guide.py")
        return int(stale)
    GUIDE.write_text(fill_layout_table(text), "utf-8")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for name, figure in make_figures():
        FigureCanvasAgg(figure).print_png(str(GUIDE.parent / "images" / name), metadata={"Software": None})
    return 0


def _new_figure(width: float, height: float, rows: int, columns: int, **more: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def _draw_shards() -> Any:
    """Draw the shards of batch and model on four ranks, axis by axis."""
    figure, panels = _new_figure(11, 4.6, 2, 5)
    cells = range(4)
    by_row = [[RANK_COLOURS[row] for _ in cells] for row in cells]
    by_column = [[RANK_COLOURS[column] for column in cells] for _ in cells]
    full = [[REPLICATED_COLOUR] * 4 for _ in cells]
    experts = [[REPLICATED_COLOUR] * 4, RANK_COLOURS, [REPLICATED_COLOUR] * 4, RANK_COLOURS]
    axes: dict[str, tuple[Colours, Colours, str]] = {
        "data (dp)": (by_row, full, "ZeRO cuts what rests"),
        "tensor (tp)": (full, by_column, ""),
        "pipeline (pp)": (full, by_row, ""),
        "sequence (sp)": (by_column, full, "ZeRO cuts what rests"),
        "experts (ep)": (by_row, experts, "ZeRO cuts what rests"),
    }
    for column, (title, (batch, model, note)) in enumerate(axes.items()):
        _draw_blocks(panels[0][column], batch, "tokens", "samples" if not column else "")
        _draw_blocks(
            panels[1][column], model, "width" if "experts" not in title else "experts in every other layer", ""
        )
        panels[1][column].set_ylabel("layers" if not column else "")
        panels[0][column].set_title(title)
        panels[1][column].set_title(note, fontsize=8, color="#555555")
    _add_legend(figure, {**{f"rank {rank}": RANK_COLOURS[rank] for rank in cells}, "every rank": REPLICATED_COLOUR})
    return figure


def _draw_blocks(panel: Any, colours: Colours, below: str, beside: str) -> None:
    from matplotlib.patches import Rectangle

    for row, line in enumerate(colours):
        for column, colour in enumerate(line):
            panel.add_patch(Rectangle((column, 3 - row), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
    panel.set(xlim=(0, 4), ylim=(0, 4), aspect="equal", xticks=[], yticks=[], xlabel=below, ylabel=beside)
    for spine in panel.spines.values():
        spine.set_visible(False)


def _draw_axis_bytes() -> Any:
    """Draw bars of received bytes, one row per model and one column per number of GPUs."""
    figure, panels = _new_figure(13, 7.5, len(MODEL_TITLES), len(LAYOUTS))
    for row, (model, name) in enumerate(MODEL_TITLES.items()):
        for column, gpus in enumerate(LAYOUTS):
            panel, result = panels[row][column], layout_bytes(PRESETS[model], gpus)
            _draw_stacked_bars(panel, result, [_bar_label(bar) for bar in result])
            panel.set_title(f"{name}, {gpus} GPUs on {gpus // GPUS_PER_NODE} node{'s' * (gpus > GPUS_PER_NODE)}")
            panel.set_xlabel("GB received by a rank in a step")
    marks = {axis: AXIS_COLOURS[axis] for axis in ("data", "tp", "pp", "sp")}
    _add_legend(figure, marks, hatched="leaves the node")
    return figure


def _bar_label(bar: LayoutBytes) -> str:
    idle = f", {100 * bar.layout.idle_fraction:.0f} % idle" if bar.layout.idle_fraction else ""
    return f"{bar.layout.name}\n{format_gb(bar.state_bytes)} GB of states{idle}"


def _draw_stacked_bars(panel: Any, found: Sequence[LayoutBytes], labels: Sequence[str]) -> None:
    for place, bar in enumerate(found):
        left = 0.0
        for (axis, leaves), nbytes in bar.received_bytes.items():
            hatch = "////" if leaves else None
            panel.barh(
                place, nbytes / 1e9, left=left, color=AXIS_COLOURS[axis], hatch=hatch, edgecolor="white", linewidth=0.5
            )
            left += nbytes / 1e9
        panel.text(left, place, f" {left:,.0f}", va="center", fontsize=8)
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    for tick, bar in zip(panel.get_yticklabels(), found, strict=True):
        tick.set_color("#b00020" if bar.state_bytes > 80e9 else "black")
    panel.invert_yaxis()
    panel.margins(x=0.1)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_sequence_lengths() -> Any:
    """Draw the received bytes against the length of one sequence, on eight ranks."""
    figure, panels = _new_figure(11, 4, 1, len(MODEL_TITLES), sharey=True)
    tokens = [2**power for power in range(12, 21)]
    colours = {
        "tp": AXIS_COLOURS["tp"],
        "Ulysses": AXIS_COLOURS["sp"],
        "ring": "#a3b18a",
        "ZeRO-3": AXIS_COLOURS["data"],
    }
    for panel, (model, name) in zip(panels[0], MODEL_TITLES.items(), strict=True):
        results = [bytes_by_sequence_method(PRESETS[model], count) for count in tokens]
        for way, colour in colours.items():
            line = "--" if way == "ring" else "-"
            gb = [item[way] / 1e9 for item in results]
            panel.loglog(tokens, gb, color=colour, label=way, base=2, marker=".", linestyle=line)
        panel.set_yscale("log", base=10)
        panel.set(title=f"{name}, one sequence on 8 ranks", xlabel="tokens", ylabel="GB received by a rank")
        panel.set_xticks(tokens[::2], [f"{count // 1024}k" for count in tokens[::2]])
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].legend(frameon=False)
    panels[0][-1].set_ylabel("")
    return figure


def _draw_schedules() -> Any:
    """Draw each pipeline schedule for four ranks and eight micro-batches, with equal stages."""
    figure, panels = _new_figure(11, 6.2, len(SCHEDULES), 1, sharex=True)
    ranks, micros = 4, 8
    colours = {
        ActionKind.FORWARD: "#a9c4de",
        ActionKind.BACKWARD: "#588157",
        ActionKind.BACKWARD_INPUT: "#588157",
        ActionKind.BACKWARD_WEIGHT: "#a3b18a",
    }
    for name, panel in zip(SCHEDULES, panels[:, 0], strict=True):
        each = 2 if name == "interleaved" else 1
        costs = ActionCosts(1 / each, 1 / each, 1 / each)
        played = simulate_schedule(build_schedule(name, ranks, micros, each), costs)
        for action, (start, stop) in played.spans.items():
            rank, colour = action.stage % ranks, colours[action.kind]
            panel.barh(rank, stop - start, left=start, color=colour, edgecolor="white", linewidth=0.6, height=0.9)
            if each == 1:
                panel.text((start + stop) / 2, rank, str(action.micro_batch), ha="center", va="center", fontsize=6)
        half = " half" * (each > 1)
        bubble = 100 * compute_bubble_fraction(name, ranks, micros, each)
        idle = f"{bubble:.0f} % idle, at most {max(played.peak_micro_batches)}{half} forwards held"
        panel.set_title(f"{name}{f', {each} parts a rank' * (each > 1)}: {idle}", fontsize=9, loc="left")
        panel.set(yticks=range(ranks), yticklabels=[f"rank {rank}" for rank in range(ranks)])
        panel.invert_yaxis()
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1][0].set_xlabel("time, in forwards of a stage")
    full = "backward (zero-bubble: of inputs)"
    _add_legend(figure, {"forward": "#a9c4de", full: "#588157", "backward of weights": "#a3b18a"})
    return figure


def _add_legend(figure: Any, marks: dict[str, str], hatched: str = "") -> None:
    from matplotlib.patches import Patch

    entries: Iterable[Any] = [Patch(facecolor=colour, label=name) for name, colour in marks.items()]
    more = [Patch(facecolor="#bbbbbb", hatch="////", edgecolor="white", label=hatched)] if hatched else []
    figure.legend(handles=[*entries, *more], loc="outside lower center", ncols=8, frameon=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
