"""Command `windlass env`: prints the properties of this machine that a bug report needs. A property that cannot be read
is not an error."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from windlass.base.text import print_escaped
from windlass.cli.environment.collect_facts import collect_facts
from windlass.cli.environment.format_facts import format_facts, format_support_table
from windlass.observe.environment.backend_support import backend_availability, support_by_device


def has_gpu() -> bool:
    """Return True if torch can use a GPU."""
    import torch

    return torch.cuda.is_available()


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
    backends: Annotated[
        bool, typer.Option("--backends", help="Print only the operations of each back end, by device.")
    ] = False,
    disk: Annotated[
        Path | None, typer.Option("--disk", metavar="FOLDER", help="Measure the disk that this folder is on.")
    ] = None,
) -> None:
    """Print versions, devices and their topology, transports between ranks, limits, and settings that reduce speed."""
    if backends:
        available = backend_availability()
        table = support_by_device(available, gpu=has_gpu())
        found = {"backends": available, "operations": table}
        lines: Iterable[str] = [json.dumps(found, indent=1)] if as_json else format_support_table(available, table)
    else:
        facts = collect_facts(disk)
        lines = [json.dumps(facts, indent=1)] if as_json else format_facts(facts)
    for line in lines:
        print_escaped(line)
