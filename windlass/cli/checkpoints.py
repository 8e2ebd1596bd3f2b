"""Command `windlass checkpoints`: lists the checkpoints of a directory and checks their files for damage."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.base.printable_console import PrintableConsole
from windlass.base.text import plural
from windlass.cli.training.run_folder import checkpoint_directory_of

if TYPE_CHECKING:
    from windlass.checkpoint.checkpoint_listing import CheckpointListing, ListedCheckpoint


def checkpoints(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory given to save_checkpoint, or OUT of `windlass train`.")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare it with its crc32.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the checkpoints in DIR, oldest first: step, size, layout, time, health. Exit code 1 if one is damaged."""
    from windlass.checkpoint.checkpoint_listing import list_checkpoints

    directory = checkpoint_directory_of(directory)
    found = list_checkpoints(directory, verify=verify)
    if as_json:
        typer.echo(json.dumps({**asdict(found), "damaged": found.is_damaged}, indent=2))
    else:
        _print_listing(found, directory)
    if found.is_damaged:
        raise typer.Exit(1)


def _print_listing(found: CheckpointListing, directory: Path) -> None:
    console = PrintableConsole(soft_wrap=True, highlight=False, markup=False)
    rows: list[tuple[str, ...]] = [("tag", "step", "size", "layout", "written", "health")]
    rows += [_listing_row(listed) for listed in found.checkpoints]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    if found.checkpoints:
        for row in rows:
            console.print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    else:
        console.print(f"there is no finished checkpoint in {directory}")
    for listed in found.checkpoints:
        if listed.problem:
            console.print(f"damaged: {listed.problem}")
    if found.problem:
        console.print(f"problem: {found.problem}")
    for left in found.leftovers:
        console.print(f"unfinished: {left.name} ({format_size(left.nbytes)}): {left.meaning}")


def _listing_row(listed: ListedCheckpoint) -> tuple[str, ...]:
    layout = [] if listed.stage is None else [f"stage {listed.stage}"]
    layout += [] if listed.ranks is None else [plural(listed.ranks, "rank")]
    layout += ["trainable parameters only"] if listed.trainable_only else []
    return (
        listed.tag + (" (latest)" if listed.latest else ""),
        "?" if listed.step is None else str(listed.step),
        format_size(listed.nbytes),
        ", ".join(layout) or "?",
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(listed.written)),
        "DAMAGED" if listed.problem else "verified" if listed.verified else "file sizes match",
    )


def format_size(nbytes: int) -> str:
    """Format a number of bytes in powers of ten: `1.2 GB`."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
