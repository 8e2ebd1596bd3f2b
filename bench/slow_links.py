"""Step time of data parallelism and of compressed optimizers on two ranks whose link the kernel limits, beside the time
that the bytes of a step take at the link's rate.

python bench/slow_links.py
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rig.compared_methods import RANKS
from rig.job import Job, Size
from rig.models import Sizes
from rig.slow_link_rank import ENGINES, MODEL, PERIODS, SlowLinkRank
from rig.worker import start_ranks

from windlass.base.byte_counts import parse_bytes
from windlass.base.log import logger
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result

_RESULTS = Path(__file__).parent / "results"
_MIB = 1 << 20
BASE = "ddp"
GOALS = {"1-bit adam": 8.0, "diloco": 20.0}
"""Least factor over DistributedDataParallel at 10 MiB/s."""
GOAL_RATE, GOAL_SHARE = 10 * _MIB, 0.85
EXPLANATION = (
    "bytes: what a rank receives in a step, on average over a cycle of the method. bytes / rate: seconds that they "
    "take at the rate of the link. compute: forward and backward alone, without the method. free: the method's step on "
    "a link without limit, codec and optimizer included. of sum: bytes / rate and free together, over the step: above "
    "100 % where messages travel during the computation. of rate: bytes / rate over the step."
)


@dataclass(frozen=True)
class Timing:
    """Mean step of one method on one link, in seconds of the slowest rank.

    Attributes:
        link: bytes per second; 0: unlimited.
        busy: CPU seconds of a rank.
        received: bytes that a rank received.
        free: seconds of the same step on a link without limit.
        compute: seconds of forward and backward without the method.
    """

    name: str
    link: int
    seconds: float
    busy: float
    received: float
    free: float
    compute: float

    @property
    def at_rate(self) -> float:
        """Seconds that the bytes take at the rate of the link."""
        return self.received / self.link if self.link else 0.0

    @property
    def of_sum(self) -> float:
        """Seconds of the bytes at the rate and of the step without limit together, over those of the step."""
        return (self.at_rate + self.free) / self.seconds

    @property
    def of_rate(self) -> float:
        """Seconds of the bytes at the rate over those of the step."""
        return self.at_rate / self.seconds


def main(
    only: Annotated[str, typer.Option(help=f"Separated by semicolons: {'; '.join(ENGINES)}.")] = ";".join(ENGINES),
    links: Annotated[str, typer.Option(help="Bytes per second of the links.")] = "10M,25M,100M",
    cycles: Annotated[int, typer.Option(min=1, help="Timed cycles of each method and link.")] = 2,
    samples: Annotated[int, typer.Option(min=1, help="Sequences of a rank.")] = 1,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")] = 64,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if a goal is missed.")] = False,
    name: Annotated[str, typer.Option(help="Name of the files in --results.")] = "slow_links",
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the picture.")] = _RESULTS,
) -> None:
    """Time the methods one after the other, print a table, write the JSON and the picture."""
    os.environ.update(OMP_NUM_THREADS="1", WINDLASS_LOG_LEVEL="ERROR")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    console, timings = bench_console(), list[Timing]()
    rates = [parse_bytes(rate.strip(), "--links") for rate in links.split(",")]
    for method in parse_methods(only):
        timings += time_method(method, rates, cycles, Size(batch=samples, length=tokens))
        console.print(table([item for item in timings if item.name == method], timings))
    console.print(table(timings, timings))
    console.print(EXPLANATION, soft_wrap=True)
    missed = missed_goals(timings)
    for line in missed:
        console.print(f"missed: {line}", soft_wrap=True, markup=False)
    data = [
        asdict(item) | {"at_rate": item.at_rate, "of_sum": item.of_sum, "of_rate": item.of_rate} for item in timings
    ]
    kept = {"bench": "slow_links", "model": asdict(MODEL), "ranks": RANKS, "samples": samples, "tokens": tokens}
    path = write_result(
        results / f"{name}.json", {**kept, "explanation": EXPLANATION, "timings": data, "missed": missed}
    )
    console.print(f"written: {path}", soft_wrap=True)
    if draw(timings, MODEL, results / f"{name}.png"):
        console.print(f"drawn: {results / f'{name}.png'}", soft_wrap=True)
    if strict and missed:
        raise typer.Exit(1)


def parse_methods(text: str) -> list[str]:
    """Return the requested methods, in the order of `ENGINES`. They are separated by semicolons.

    Raises:
        BadParameter: there is no such method.
    """
    requested = {word.strip() for word in text.split(";")}
    if missing := requested - set(ENGINES):
        raise typer.BadParameter(f"--only {'; '.join(sorted(missing))}: there are {'; '.join(ENGINES)}")
    return [method for method in ENGINES if method in requested]


def time_method(method: str, rates: list[int], cycles: int, size: Size) -> list[Timing]:
    """Train with one method on two ranks, first without a limit and then at each rate."""
    count = cycles * PERIODS.get(method, 1)
    pool = start_ranks(Job(method, RANKS, size), SlowLinkRank)
    timings: list[Timing] = []
    try:
        compute = max(float(one["compute"]) for one in pool.ask("build"))
        for rate in (0, *rates):
            pool.ask("pace", rate=rate)
            by_rank = pool.ask("steps", count=count)
            seconds, busy, received = (
                max(float(one[key]) for one in by_rank) / count for key in ("seconds", "busy", "bytes")
            )
            free = timings[0].free if timings else seconds
            timings.append(Timing(method, rate, seconds, busy, received, free, compute))
    finally:
        pool.close()
    return timings


def factor(timing: Timing, timings: list[Timing]) -> float | None:
    """Return how many times as long DistributedDataParallel takes on the same link; None if it was not timed."""
    base = next((item for item in timings if item.name == BASE and item.link == timing.link), None)
    return None if base is None else base.seconds / timing.seconds


def missed_goals(timings: list[Timing]) -> list[str]:
    """Return a line for each goal that was measured and missed."""
    lines = []
    for item in timings:
        faster, goal = factor(item, timings), GOALS.get(item.name)
        if goal is not None and faster is not None and item.link == GOAL_RATE and faster < goal:
            lines.append(f"{item.name} at {item.link / _MIB:g} MiB/s: {faster:.1f} x as fast as DDP, not {goal:g}")
        if item.link and item.of_sum < GOAL_SHARE:
            lines.append(f"{item.name} at {item.link / _MIB:g} MiB/s: {item.of_sum:.0%} of bytes / rate and free step")
    return lines


def table(chosen: list[Timing], timings: list[Timing]) -> Table:
    """Return a table of some timings, compared with data parallelism among all."""
    made = Table(title=f"a step on {RANKS} ranks x 1 thread, {numel_of(MODEL)}", title_justify="left")
    made.add_column("", no_wrap=True)
    for column in ("MiB/s", "MiB", "bytes/rate s", "compute s", "free s", "step s", "of sum", "of rate", "DDP / it"):
        made.add_column(column, justify="right", no_wrap=True)
    for item in chosen:
        faster = factor(item, timings)
        made.add_row(
            item.name,
            f"{item.link / _MIB:g}" if item.link else "free",
            f"{item.received / _MIB:.2f}",
            f"{item.at_rate:.3f}" if item.link else "",
            f"{item.compute:.3f}",
            f"{item.free:.3f}",
            f"{item.seconds:.3f}",
            f"{item.of_sum:.0%}" if item.link else "",
            f"{item.of_rate:.0%}" if item.link else "",
            "" if faster is None else f"{faster:.1f}",
        )
    return made


def numel_of(sizes: Sizes) -> str:
    """Return the number of parameters as text."""
    return f"a Llama of {sizes.shape().numel / 1e6:.1f}M parameters in fp32"


def draw(timings: list[Timing], sizes: Sizes, path: Path) -> bool:
    """Plot the step time over the rate of the link. Without matplotlib, return False."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no picture: matplotlib is not installed (pip install 'windlass[plot]')")
        return False
    figure = Figure(figsize=(8, 5.5), dpi=140, layout="constrained")
    axes = figure.subplots()
    for method in dict.fromkeys(item.name for item in timings):
        paced = sorted((item for item in timings if item.name == method and item.link), key=lambda item: item.link)
        at = [item.link / _MIB for item in paced]
        (line,) = axes.plot(at, [item.seconds for item in paced], "o-", label=method)
        axes.plot(at, [item.at_rate for item in paced], ":", color=line.get_color(), linewidth=1)
    ticks = sorted({item.link / _MIB for item in timings if item.link})
    axes.set(xscale="log", yscale="log", xlabel="MiB/s of the link, in each direction", ylabel="seconds of a step")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.suptitle(f"{numel_of(sizes)} on {RANKS} ranks; dotted: its bytes over the rate")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(str(path))
    return True


if __name__ == "__main__":
    typer.run(main)
