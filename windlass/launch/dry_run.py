"""`windlass run --dry-run`: a drawing of the ranks on their hosts and of what each axis sends, and no run."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

from windlass.base.text import plural
from windlass.launch.errors import LaunchError
from windlass.launch.flags import AXES
from windlass.launch.request import hosts_of

if TYPE_CHECKING:
    from rich.console import Console

    from windlass.launch.sketch import Sketch

MOST_NODES = 16
"""Nodes that are drawn; the others are like them."""
_SHAPE, _TOKENS = "7b", 4096
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def refuse_idle(args: argparse.Namespace) -> None:
    """Raise for flags that only a dry run reads.

    Raises:
        LaunchError: names the flag.
    """
    if args.dry_run:
        return
    for name in ("config", "shape", "tokens", *AXES):
        if getattr(args, name.replace("-", "_")) is not None:
            raise LaunchError(f"--{name} is for --dry-run; a run's script has a configuration of its own: leave it out")


def show(args: argparse.Namespace, console: Console | None = None) -> int:
    """Draw what `args` ask for; returns the exit code.

    Raises:
        ConfigError: sizes that don't multiply to the ranks, a configuration or a model's shape that can't be read.
        LaunchError: hosts that make no sense, or sizes said twice.
    """
    from windlass.base.screen import PrintableConsole

    wide = 120 if not sys.stdout.isatty() else None  # a pipe has no width, and would get 80
    draw(
        _sketch_of(args), console or PrintableConsole(width=wide, highlight=False, soft_wrap=True), args.shape or _SHAPE
    )
    return 0


def _sketch_of(args: argparse.Namespace) -> Sketch:
    from windlass.comm.grid import Grid
    from windlass.config import load
    from windlass.launch.sketch import Sketch
    from windlass.parallel.model_shape import shape_of
    from windlass.parallel.volumes import Work

    said = {axis.replace("-", "_"): getattr(args, axis.replace("-", "_")) for axis in AXES}
    sizes = {axis: size for axis, size in said.items() if size is not None}
    if sizes and args.config:
        raise LaunchError(f"--config and --{next(iter(sizes)).replace('_', '-')} together; give one of them")
    tokens = _TOKENS if args.tokens is None else args.tokens
    if tokens < 1:
        raise LaunchError(f"--tokens {tokens}; at least one is needed")
    config = load(args.config or {"parallel": sizes})
    hosts, _ = hosts_of(args)
    world = sum(len(host.slots) for host in hosts)
    axes = config.axes(world, "these hosts' slots")
    table = config.dtype_table("bf16")
    shape = shape_of(args.shape or _SHAPE)
    bytes_of = {"fp32": 4, "bf16": 2, "fp16": 2}
    work = Work(
        tokens=tokens,
        micro_batches=config.gradient_accumulation_steps or config.pipeline.micro_batches or axes.pp,
        stage=config.zero_optimization.stage,
        activation_bytes=bytes_of[table.compute],
        parameter_bytes=bytes_of[table.parameter],
        gradient_bytes=bytes_of[table.reduce],
        regather=axes.regather or 0,
        once=config.pipeline.gather == "schedule",
        cut_norms=config.parallel.tp_sequence_norms,
        recompute=config.pipeline.activation_checkpoint_interval > 0,
        ulysses=config.parallel.ulysses(axes.sp) or math.gcd(axes.sp, max(1, shape.key_heads // axes.tp)),
        chunks=config.pipeline.parts,
    )
    return Sketch(Grid(**axes.sizes), hosts, shape, work)


def draw(sketch: Sketch, console: Console, shape: str) -> None:
    """Write the drawing: nodes, axes, and what is wrong."""
    grid, work, model = sketch.grid, sketch.work, sketch.model
    console.print(f"{plural(grid.world, 'rank')} on {plural(len(sketch.hosts), 'node')}: {grid}\n")
    console.print(_nodes(sketch))
    rest = len(sketch.hosts) - MOST_NODES
    if rest > 0:
        console.print(f"  and {plural(rest, 'more node')}, up to rank {grid.world - 1}\n")
    console.print(_talks(sketch))
    console.print(
        f"Counted for a model of {model.parameters / 1e9:.3g}e9 parameters (--shape {shape}): a step of "
        f"{plural(work.micro_batches, 'micro-batch', 'micro-batches')} of {work.tokens:,} tokens (--tokens), ZeRO "
        f"stage {work.stage};\nactivations of {work.activation_bytes} bytes an element, parameters of "
        f"{work.parameter_bytes}, gradients of {work.gradient_bytes}; of several stages the one that receives most.",
        style="dim",
    )
    for warning in sketch.warnings():
        console.print(f"warning: {warning}", style="bold yellow")


def _nodes(sketch: Sketch) -> Any:
    """A block a node: a column for each local rank, a row for each axis of several ranks."""
    from rich.table import Table

    widest = max(len(places) for places in sketch.nodes)
    table = Table(box=None, padding=(0, 1), show_header=True)
    table.add_column("node")
    table.add_column("local rank")
    for local in range(widest):
        table.add_column(str(local), justify="right")
    for host, places in list(zip(sketch.hosts, sketch.nodes, strict=True))[:MOST_NODES]:
        at = [sketch.grid.coordinates(place.rank) for place in places]
        table.add_row(host.name, "rank", *(str(place.rank) for place in places), style="bold")
        for index, axis in enumerate(sketch.shown_axes):
            last = index == len(sketch.shown_axes) - 1
            cells = (f"[{_COLOURS[place[axis] % len(_COLOURS)]}]{place[axis]}[/]" for place in at)
            table.add_row("", axis, *cells, end_section=last)
        table.add_row("")
    return table


def _talks(sketch: Sketch) -> Any:
    """A row an axis: its ranks, whether it leaves a node, and what a rank receives in a step."""
    from rich.table import Table

    from windlass.launch.sketch import ranges

    table = Table(box=None, padding=(0, 1))
    for name, justify in (("axis", "left"), ("ranks", "right"), ("such as", "left"), ("wires", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # rich names the words
    table.add_column("received a step", justify="right")
    table.add_column("of what")
    for talk in sketch.talks():
        wires = "inside a node" if talk.nodes == 1 else f"across {talk.nodes} nodes"
        what = ", ".join(talk.what)
        table.add_row(talk.axis, str(talk.ranks), ranges(talk.example), wires, _words(talk.nbytes), what)
    return table


def _words(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes} B"
