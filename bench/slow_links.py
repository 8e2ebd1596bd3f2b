"""Step time of data parallelism and of compressed optimizers on two ranks whose link the kernel limits, and of stage 3
with and without ZeRO++ on two hosts of two ranks, compared with the time of a step's bytes at the link's rate.

python bench/slow_links.py
python bench/slow_links.py --pieces 100    (repeat until it prints the table)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rig.chosen_names import choose_names
from rig.compared_methods import RANKS
from rig.hosted_rank import HOSTED, HOSTED_RANKS, PER_HOST, hosted_sizes, start_hosted_ranks
from rig.job import Job, Size
from rig.models import Sizes
from rig.slow_link_rank import ENGINES, MODEL, PERIODS, SlowLinkRank
from rig.two_hosts import TwoHosts, why_no_hosts
from rig.worker import start_ranks

from windlass.base.byte_counts import parse_bytes
from windlass.base.log import logger
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import run_facts, write_result
from windlass.cli.benches.rank_pool import RankPool

_RESULTS = Path(__file__).parent / "results"
_MIB = 1 << 20
METHODS = (*ENGINES, *HOSTED)
BASE, HOSTED_BASE = "ddp", "stage 3"
GOALS = {"1-bit adam": 8.0, "diloco": 20.0, "zero++": 2.0}
"""Least factor over DistributedDataParallel (ZeRO++: over stage 3) at 10 MiB/s."""
GOAL_RATE, GOAL_SHARE = 10 * _MIB, 0.85
EXPLANATION = (
    "bytes: received over the link in a step by a rank (stage 3 and ZeRO++: by a host), on average over a cycle of "
    "the method. bytes / rate: seconds that they take at the rate of the link. compute: forward and backward alone, "
    "without the method. free: the method's step on a link without limit, codec and optimizer included. of sum: bytes "
    "/ rate and free together, over the step: above 100 % where messages travel during the computation. of rate: bytes "
    "/ rate over the step. base / it: step of DistributedDataParallel (ZeRO++: of stage 3) over the method's."
)


@dataclass(frozen=True)
class Timing:
    """Mean step of one method on one link, in seconds of the slowest rank.

    Attributes:
        link: bytes per second; 0: unlimited.
        busy: CPU seconds of a rank.
        received: bytes that a rank received; with two hosts, bytes that one host received from the other.
        free: seconds of the same step on a link without limit.
        compute: seconds of forward and backward without the method.
        commit: commit of windlass that was measured.
    """

    name: str
    link: int
    seconds: float
    busy: float
    received: float
    free: float
    compute: float
    commit: str | None = None

    @property
    def at_rate(self) -> float:
        """Seconds that the bytes take at the rate of the link."""
        return self.received / self.link if self.link else 0.0

    @property
    def of_sum(self) -> float:
        """Transfer time at the link's rate plus the step without limit, relative to the measured step."""
        return (self.at_rate + self.free) / self.seconds

    @property
    def of_rate(self) -> float:
        """Transfer time at the link's rate, relative to the measured step."""
        return self.at_rate / self.seconds


def main(
    only: Annotated[str, typer.Option(help=f"Separated by semicolons: {'; '.join(METHODS)}.")] = ";".join(METHODS),
    links: Annotated[str, typer.Option(help="Bytes per second of the links.")] = "10M,25M,100M",
    pieces: Annotated[
        float,
        typer.Option(min=0, help="Stop after some seconds; the next call continues. 0: run to the end."),
    ] = 0.0,
    cycles: Annotated[int, typer.Option(min=1, help="Timed cycles of each method and link.")] = 2,
    samples: Annotated[int, typer.Option(min=1, help="Sequences of a rank.")] = 1,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model; half as many on two hosts.")] = MODEL.layers,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if a goal is missed.")] = False,
    name: Annotated[str, typer.Option(help="Name of the files in --results.")] = "slow_links",
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the picture.")] = _RESULTS,
) -> None:
    """Time the methods one after the other, print a table, write the JSON and the picture."""
    os.environ.update(OMP_NUM_THREADS="1", WINDLASS_LOG_LEVEL="ERROR")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    console, begin, methods = bench_console(), time.monotonic(), choose_names(only, METHODS, ";")
    rates = [0, *(parse_bytes(rate.strip(), "--links") for rate in links.split(","))]
    refused = why_no_hosts() if set(methods) & set(HOSTED) else None
    if refused:
        console.print(f"{refused}, so connections between hosts are paced", soft_wrap=True, markup=False)
    size = Size(batch=samples, length=tokens, layers=layers)
    rows = Rows(results / f"{name}.json", setting_of(size, cycles, methods, in_spaces=not refused))
    if pieces:
        rows.read()
    for method in methods:
        missing = rows.missing(method, rates)
        if missing and not 0 < pieces < time.monotonic() - begin:
            timings = time_method(method, missing, cycles, size, rows.timings, in_spaces=not refused)
            with closing(timings):  # closing the generator ends the ranks
                for timing in timings:
                    rows.add(timing)
                    if 0 < pieces < time.monotonic() - begin:
                        break
            console.print(table([item for item in rows.timings if item.name == method], rows.timings))
    if any(rows.missing(method, rates) for method in methods):
        console.print(f"{len(rows.timings)} rows are measured; call again to continue")
        return
    _show(rows.timings, layers, rows.path, console)
    if strict and missed_goals(rows.timings):
        raise typer.Exit(1)


def _show(timings: list[Timing], layers: int, path: Path, console: Console) -> None:
    console.print(table(timings, timings))
    console.print(EXPLANATION, soft_wrap=True)
    for line in missed_goals(timings):
        console.print(f"missed: {line}", soft_wrap=True, markup=False)
    console.print(f"written: {path}", soft_wrap=True)
    picture = path.with_suffix(".png")
    if draw(timings, layers, picture):
        console.print(f"drawn: {picture}", soft_wrap=True)


@dataclass
class Rows:
    """Timings in a file.

    Attributes:
        setting: values that are equal for all timings, by key of the file.
    """

    path: Path
    setting: dict[str, Any]
    timings: list[Timing] = field(default_factory=list)

    def read(self) -> None:
        """Read the rows of earlier calls.

        Raises:
            BadParameter: the rows were measured with another setting.
        """
        if not self.path.is_file():
            return
        stored = json.loads(self.path.read_text())
        for key, value in self.setting.items():
            if stored.get(key, value) != value:
                raise typer.BadParameter(
                    f"{self.path.name} has rows with {key} {stored[key]!r}, and this call has {value!r}; write another "
                    "--name, or delete the file"
                )
        self.setting = {key: stored[key] for key in ("hosts",) if key in stored} | self.setting
        names = [one.name for one in fields(Timing)]
        self.timings = [Timing(**{key: item[key] for key in names if key in item}) for item in stored["timings"]]

    def missing(self, method: str, rates: list[int]) -> list[int]:
        """Return the rates at which a method was not timed."""
        return [rate for rate in rates if not any(item.name == method and item.link == rate for item in self.timings)]

    def add(self, timing: Timing) -> None:
        """Add a row, and write the file."""
        self.timings.append(timing)
        self.timings.sort(key=lambda item: METHODS.index(item.name))
        data = [
            asdict(item) | {"at_rate": item.at_rate, "of_sum": item.of_sum, "of_rate": item.of_rate}
            for item in self.timings
        ]
        kept = {"bench": "slow_links", **self.setting, "explanation": EXPLANATION}
        write_result(self.path, {**kept, "timings": data, "missed": missed_goals(self.timings)})


def setting_of(size: Size, cycles: int, methods: list[str], *, in_spaces: bool) -> dict[str, Any]:
    """Return the values that all rows of a file have in common."""
    setting: dict[str, Any] = {
        "model": asdict(sizes_of(BASE, size.layers)),
        "ranks": RANKS,
        "hosted_model": asdict(sizes_of(HOSTED_BASE, size.layers)),
        "hosted_ranks": HOSTED_RANKS,
        "samples": size.batch,
        "tokens": size.length,
        "cycles": cycles,
    }
    if set(methods) & set(HOSTED):
        setting["hosts"] = "network namespaces" if in_spaces else "paced connections, each with an equal share"
    return setting


def sizes_of(method: str, layers: int) -> Sizes:
    """Return the sizes of a method's model."""
    return hosted_sizes(layers) if method in HOSTED else replace(MODEL, layers=layers)


def time_method(
    method: str, rates: list[int], cycles: int, size: Size, before: list[Timing], *, in_spaces: bool
) -> Generator[Timing, None, None]:
    """Train with one method, and yield its timing at each rate.

    Args:
        before: earlier rows. Unless `rates` begins with 0 (no limit), they include this method's row without a limit.
        in_spaces: hosts are network namespaces.
    """
    count, commit = cycles * PERIODS.get(method, 1), run_facts()["commit"]
    first = next((item for item in before if item.name == method and not item.link), None)
    with ExitStack() as stack:
        hosts = stack.enter_context(TwoHosts()) if method in HOSTED and in_spaces else None
        pool = _start(method, size, hosts)
        stack.callback(pool.close)
        compute = max(float(one["compute"]) for one in pool.ask("build"))
        for rate in rates:
            if hosts is not None:
                hosts.limit(rate)
            else:
                pool.ask("pace", rate=rate)
            by_rank = pool.ask("steps", count=count)
            seconds, busy = (max(float(one[key]) for one in by_rank) / count for key in ("seconds", "busy"))
            received = received_over_link(method, [float(one["bytes"]) for one in by_rank]) / count
            free, alone = (first.free, first.compute) if first is not None else (seconds, compute)
            timing = Timing(method, rate, seconds, busy, received, free, alone, commit)
            first = first or timing
            yield timing


def _start(method: str, size: Size, hosts: TwoHosts | None) -> RankPool:
    if method in HOSTED:
        return start_hosted_ranks(Job(method, HOSTED_RANKS, size), hosts)
    return start_ranks(Job(method, RANKS, size), SlowLinkRank)


def received_over_link(method: str, by_rank: list[float]) -> float:
    """Return the bytes that pass a link in its busier direction, given those that each rank received over links."""
    each = PER_HOST if method in HOSTED else 1
    return max(sum(by_rank[first : first + each]) for first in range(0, len(by_rank), each))


def factor(timing: Timing, timings: list[Timing]) -> float | None:
    """Return the step time of the base over that of `timing`, on the same link; None if the base was not timed.

    The base is DistributedDataParallel, or for methods on two hosts stage 3.
    """
    name = HOSTED_BASE if timing.name in HOSTED else BASE
    base = next((item for item in timings if item.name == name and item.link == timing.link), None)
    return None if base is None else base.seconds / timing.seconds


def missed_goals(timings: list[Timing]) -> list[str]:
    """Return a line for each goal that was measured and missed."""
    lines = []
    for item in timings:
        faster, goal = factor(item, timings), GOALS.get(item.name)
        if goal is not None and faster is not None and item.link == GOAL_RATE and faster < goal:
            base = HOSTED_BASE if item.name in HOSTED else "DDP"
            lines.append(f"{item.name} at {item.link / _MIB:g} MiB/s: {faster:.1f} x as fast as {base}, not {goal:g}")
        if item.link and item.of_sum < GOAL_SHARE:
            lines.append(f"{item.name} at {item.link / _MIB:g} MiB/s: {item.of_sum:.0%} of bytes / rate and free step")
    return lines


def table(chosen: list[Timing], timings: list[Timing]) -> Table:
    """Return a table of the timings in `chosen`, compared with their bases in `timings`."""
    title = f"a step of ranks with 1 thread: {RANKS}, or {HOSTED_RANKS} on two hosts ({', '.join(HOSTED)})"
    made = Table(title=title, title_justify="left")
    made.add_column("", no_wrap=True)
    for column in ("MiB/s", "MiB", "bytes/rate s", "compute s", "free s", "step s", "of sum", "of rate", "base / it"):
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


def numel_of(method: str, layers: int) -> str:
    """Describe a method's model by its number of parameters and its dtype."""
    dtype = "bf16" if method in HOSTED else "fp32"
    return f"a Llama of {sizes_of(method, layers).shape().numel / 1e6:.1f}M parameters in {dtype}"


def draw(timings: list[Timing], layers: int, path: Path) -> bool:
    """Plot the step time over the rate of the link. Without matplotlib, return False."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no picture: matplotlib is not installed (pip install 'windlass[plot]')")
        return False
    groups = [group for group in (ENGINES, HOSTED) if any(item.name in group for item in timings)]
    figure = Figure(figsize=(7 * len(groups), 5.5), dpi=140, layout="constrained")
    for group, axes in zip(groups, figure.subplots(1, len(groups), squeeze=False)[0], strict=True):
        _draw_group([item for item in timings if item.name in group], axes)
        base = next(iter(group))
        ranks = f"{HOSTED_RANKS} ranks of two hosts" if group is HOSTED else f"{RANKS} ranks"
        axes.set_title(f"{numel_of(base, layers)} on {ranks}", fontsize="medium")
    figure.suptitle("dotted: the bytes of a step over the rate")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(str(path))
    return True


def _draw_group(timings: list[Timing], axes: Any) -> None:
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


if __name__ == "__main__":
    typer.run(main)
