"""`windlass run --dry-run`: prints the placement of ranks on hosts and the traffic of each axis, and starts nothing."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

from windlass.base.text import plural
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_flags import AXIS_FLAGS
from windlass.launch.plan_from_flags import hosts_from_args

if TYPE_CHECKING:
    from rich.console import Console

    from windlass.launch.rank_map import HostRankMap

MAX_DRAWN_NODES = 16
"""Maximum number of nodes that are drawn; the others are only counted."""
_DEFAULT_SHAPE, _DEFAULT_TOKENS = "7b", 4096
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def reject_dry_run_flags(args: argparse.Namespace) -> None:
    """Reject flags that only a dry run reads, unless `--dry-run` is set.

    Raises:
        LaunchError: such a flag is given; the message names it.
    """
    if args.dry_run:
        return
    for name in ("config", "shape", "tokens", *AXIS_FLAGS):
        if getattr(args, name.replace("-", "_")) is not None:
            raise LaunchError(
                f"--{name} is for --dry-run; leave it out, because the script of a run has its own configuration"
            )


def show_rank_map(args: argparse.Namespace, console: Console | None = None) -> int:
    """Draw the rank map that `args` describe. Return the exit code.

    Raises:
        ConfigError: sizes do not multiply to the number of ranks, or a configuration or model shape cannot be read.
        LaunchError: the hosts are invalid, `--tokens` is below 1, or `--config` and an axis flag are both given.
    """
    from windlass.base.printable_console import PrintableConsole

    wide = 120 if not sys.stdout.isatty() else None  # rich would assume 80 columns for a pipe
    draw_rank_map(
        _rank_map_from_args(args),
        console or PrintableConsole(width=wide, highlight=False, soft_wrap=True),
        args.shape or _DEFAULT_SHAPE,
    )
    return 0


def _rank_map_from_args(args: argparse.Namespace) -> HostRankMap:
    from windlass.comm.mesh_shape import MeshShape
    from windlass.config import load_config
    from windlass.launch.rank_map import HostRankMap
    from windlass.parallel.comm_volumes import StepWorkload
    from windlass.parallel.model_shape import parse_model_shape

    given_sizes = {axis.replace("-", "_"): getattr(args, axis.replace("-", "_")) for axis in AXIS_FLAGS}
    sizes = {axis: size for axis, size in given_sizes.items() if size is not None}
    if sizes and args.config:
        raise LaunchError(f"--config and --{next(iter(sizes)).replace('_', '-')} together; give one of them")
    tokens = _DEFAULT_TOKENS if args.tokens is None else args.tokens
    if tokens < 1:
        raise LaunchError(f"--tokens {tokens}; at least one is needed")
    config = load_config(args.config or {"parallel": sizes})
    hosts, _ = hosts_from_args(args)
    world = sum(len(host.slots) for host in hosts)
    axes = config.axes(world, "the slots of these hosts")
    table = config.dtype_table("bf16")
    shape = parse_model_shape(args.shape or _DEFAULT_SHAPE)
    bytes_of = {"fp32": 4, "bf16": 2, "fp16": 2}
    work = StepWorkload(
        tokens=tokens,
        micro_batches=config.gradient_accumulation_steps or config.pipeline.micro_batches or axes.pp,
        zero_stage=config.zero_optimization.stage,
        activation_bytes=bytes_of[table.compute_dtype],
        parameter_bytes=bytes_of[table.param_dtype],
        gradient_bytes=bytes_of[table.reduce_dtype],
        backward_gather_ranks=axes.secondary_size or 0,
        unshards_once=config.pipeline.unshard_per == "step",
        tp_sequence_norms=config.parallel.tp_sequence_norms,
        recompute=config.pipeline.activation_checkpoint_interval > 0,
        ulysses_degree=config.parallel.ulysses_size(axes.sp)
        or math.gcd(axes.sp, max(1, shape.resolved_kv_heads // axes.tp)),
        virtual_stages=config.pipeline.resolved_virtual_stages,
    )
    return HostRankMap(MeshShape(**axes.sizes), hosts, shape, work)


def draw_rank_map(rank_map: HostRankMap, console: Console, shape: str) -> None:
    """Print the tables of nodes and of axes, and the warnings."""
    grid, work, model = rank_map.grid, rank_map.workload, rank_map.model
    console.print(f"{plural(grid.world, 'rank')} on {plural(len(rank_map.hosts), 'node')}: {grid}\n")
    console.print(_node_table(rank_map))
    rest = len(rank_map.hosts) - MAX_DRAWN_NODES
    if rest > 0:
        console.print(f"  and {plural(rest, 'more node')}, up to rank {grid.world - 1}\n")
    console.print(_traffic_table(rank_map))
    console.print(
        f"Counted for a model of {model.numel / 1e9:.3g}e9 parameters (--shape {shape}): a step of "
        f"{plural(work.micro_batches, 'micro-batch', 'micro-batches')} of {work.tokens:,} tokens (--tokens), ZeRO "
        f"stage {work.zero_stage};\nactivations of {work.activation_bytes} bytes an element, parameters of "
        f"{work.parameter_bytes}, gradients of {work.gradient_bytes}; all figures are for the stage that receives "
        "most.",
        style="dim",
        markup=False,  # a path may have brackets
    )
    for warning in rank_map.warnings():
        console.print(f"warning: {warning}", style="bold yellow")


def _node_table(rank_map: HostRankMap) -> Any:
    """Build a table with a block for each node: a column for each local rank, a row for each axis of several ranks."""
    from rich.markup import escape
    from rich.table import Table

    widest = max(len(places) for places in rank_map.placements_of_node)
    table = Table(box=None, padding=(0, 1), show_header=True)
    table.add_column("node")
    table.add_column("local rank")
    for local in range(widest):
        table.add_column(str(local), justify="right")
    for host, places in list(zip(rank_map.hosts, rank_map.placements_of_node, strict=True))[:MAX_DRAWN_NODES]:
        at = [rank_map.grid.coordinates(place.rank) for place in places]
        table.add_row(escape(host.name), "rank", *(str(place.rank) for place in places), style="bold")
        for index, axis in enumerate(rank_map.parallel_axes):
            last = index == len(rank_map.parallel_axes) - 1
            cells = (f"[{_COLOURS[place[axis] % len(_COLOURS)]}]{place[axis]}[/]" for place in at)
            table.add_row("", axis, *cells, end_section=last)
        table.add_row("")
    return table


def _traffic_table(rank_map: HostRankMap) -> Any:
    """Build a table with a row for each axis: its ranks, the nodes it spans, and the bytes received in a step."""
    from rich.table import Table

    from windlass.launch.rank_map import format_rank_list

    table = Table(box=None, padding=(0, 1))
    for name, justify in (("axis", "left"), ("ranks", "right"), ("such as", "left"), ("wires", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # rich types it as a Literal
    table.add_column("received a step", justify="right")
    table.add_column("of what")
    for talk in rank_map.axis_traffic():
        wires = "inside a node" if talk.num_nodes == 1 else f"across {talk.num_nodes} nodes"
        what = ", ".join(talk.tensors)
        table.add_row(
            talk.axis,
            str(talk.num_ranks),
            format_rank_list(talk.example_ranks),
            wires,
            _format_bytes(talk.nbytes),
            what,
        )
    return table


def _format_bytes(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes} B"
