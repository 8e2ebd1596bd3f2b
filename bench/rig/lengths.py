"""Longest sequences under a memory cap, with each technique on and off: measurement, tables and picture."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from rig.job import Job
from rig.length_rank import LengthRank
from rig.techniques import ROWS, SIZES, TILE, Point, exceeding, longest, search
from rig.worker import start_ranks
from windlass.base.log import logger
from windlass.cli.benches.rank_pool import RankPool

Say = Callable[[str], None]
Found = dict[str, list[Point]]
EQUAL_LOSS = 1e-5
_MIB = 1 << 20
_COLORS = [f"C{number}" for number in range(10)] + ["#1b1b1b", "#b8860b", "#006d5b"]
_EMULATED = "64G"  # emulated device memory: never full, but apart from host memory, so that offloading happens
# Freed memory returns to the system at once, so that resident bytes are those in use.
_MALLOC = {
    "WINDLASS_KEEP_FREED_MEMORY": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 10),
}
EXPLANATION = (
    "peak: resident bytes of the rank that takes most in a step (forward, backward, AdamW), sampled every "
    "millisecond, above those after importing torch and transformers, so parameters, gradients and moments count; "
    "freed memory returns to the system at once. Inputs `to host`: the device is emulated "
    "(WINDLASS_EMULATE_DEVICE), and offloaded bytes in host memory are subtracted; `resident` in the JSON includes "
    "them. For inputs `to files` nothing is subtracted."
)


def stretch(rows: Sequence[str], cap: int, *, first: int, most: int, say: Say) -> Found:
    """Search the longest sequence that fits under `cap` for each row of `rig.techniques`. Return all points by row."""
    results: Found = {}
    for name in rows:
        with _environment(name), start_ranks(Job(name, ROWS[name].sp), LengthRank) as pool:
            pool.ask("build")

            def measure(length: int, pool: RankPool = pool) -> Point:
                result = pool.ask("step", length=length)
                most_of = {key: max(item[key] for item in result) for key in ("peak", "resident", "seconds")}
                return Point(length, loss=result[0]["loss"], **most_of)

            results[name] = search(measure, cap, first=first, most=most, grain=32)
        say(f"length: {name}: {said(results[name], cap)} tokens fit")
    return results


@contextmanager
def _environment(name: str) -> Iterator[None]:
    """Set the environment of ranks that start inside. Their files are in the working directory, because the system's
    temporary folder may be in memory."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="windlass-bench-", dir=".") as folder:
        os.environ.update(_MALLOC, WINDLASS_BENCH_FILES=str(Path(folder).resolve()))
        if ROWS[name].inputs == "cpu":
            os.environ["WINDLASS_EMULATE_DEVICE"] = _EMULATED
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def losses_apart(found: Mapping[str, Sequence[Point]]) -> float:
    """Return the largest relative difference of a row's loss from the first row's, at the first length."""
    losses = [points[0].loss for points in found.values()]
    return max((abs(item - losses[0]) / abs(losses[0]) if math.isfinite(item) else math.inf) for item in losses)


def table(found: Found, cap: int) -> Table:
    """Return a table of the longest sequence of each row."""
    title = f"longest sequence whose step takes at most {cap / _MIB:.0f} MiB on a rank"
    made = Table(title=title, title_justify="left")
    made.add_column("on", no_wrap=True)
    for column in ("tokens", "x nothing", "peak MiB", "bytes a token", "s a step"):
        made.add_column(column, justify="right", no_wrap=True)
    base = longest(found[next(iter(found))], cap)
    for name, points in found.items():
        best = longest(points, cap)
        if best is None:
            made.add_row(name, said(points, cap))
            continue
        ratio = f"{best.length / base.length:.1f}" if base else ""
        each = f"{slope(points):,.0f}" if len(points) > 1 else ""
        made.add_row(name, said(points, cap), ratio, f"{best.peak / _MIB:.0f}", each, f"{best.seconds:.1f}")
    return made


def said(points: Sequence[Point], cap: int) -> str:
    """Describe the longest sequence that fits, if there is one, and whether longer ones may fit."""
    best = longest(points, cap)
    if best is None:
        return f"< {points[0].length:,}"
    return f"{best.length:,}" if exceeding(points, cap) else f">= {best.length:,}"


def slope(points: Sequence[Point]) -> float:
    """Return the bytes per additional token, between the shortest and the longest sequence."""
    return (points[-1].peak - points[0].peak) / (points[-1].length - points[0].length)


def plain(found: Found, cap: int) -> dict[str, Any]:
    """Return plain data for the JSON."""
    best = {name: longest(points, cap) for name, points in found.items()}
    return {
        "cap": cap,
        "model": asdict(SIZES),
        "tile": TILE,
        "how": EXPLANATION,
        "losses_apart": losses_apart(found),
        "rows": {
            name: {
                "tricks": asdict(ROWS[name]),
                "longest": entry.length if (entry := best[name]) is not None else None,
                "points": [asdict(point) for point in points],
            }
            for name, points in found.items()
        },
    }


def draw(found: Found, cap: int, path: Path) -> bool:
    """Plot memory against length, and the longest length of each row. Without matplotlib, return False."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no picture: matplotlib is not installed (pip install 'windlass[plot]')")
        return False
    figure = Figure(figsize=(12, 5.5), dpi=140, layout="constrained")
    memory, bars = figure.subplots(1, 2, width_ratios=[3, 2])
    for number, (name, points) in enumerate(found.items()):
        color, best = _COLORS[number % len(_COLORS)], longest(points, cap)
        at, peaks = [point.length for point in points], [point.peak / _MIB for point in points]
        memory.plot(at, peaks, "--" if name.startswith("all but") else "-", color=color, marker=".", linewidth=1.2)
        bars.barh(name, best.length if best else 0, color=color, hatch="///" if name.startswith("all but") else "")
        bars.annotate(f" {said(points, cap)}", (best.length if best else 0, number), va="center", fontsize=8)
    memory.axhline(cap / _MIB, color="#b00020", linestyle=":")
    memory.annotate(
        f"cap: {cap / _MIB:.0f} MiB", (1, cap / _MIB), xycoords=("axes fraction", "data"), ha="right", va="bottom"
    )
    ticks = sorted({2 ** round(math.log2(point.length)) for points in found.values() for point in points})
    memory.set_xscale("log", base=2)
    memory.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    memory.set(xlabel="tokens of the sequence", ylabel="peak MiB of a rank (colours: see the bars)")
    bars.set(xlabel="tokens of the longest that fits")
    bars.margins(x=0.15)
    bars.invert_yaxis()
    for axes in (memory, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"A Llama of {SIZES.shape().numel / 1e6:.1f}M parameters in fp32 with AdamW: which sequences fit")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(str(path))
    return True
