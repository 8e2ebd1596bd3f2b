"""Command `windlass env`: prints the facts of this machine that a bug report needs; never fails for a missing one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from windlass.base.text import print_escaped
from windlass.cli.environment.collect_facts import collect_facts
from windlass.cli.environment.format_facts import format_facts


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
    disk: Annotated[
        Path | None, typer.Option("--disk", metavar="FOLDER", help="Measure the disk that this folder is on.")
    ] = None,
) -> None:
    """Print versions, devices and their topology, transports between ranks, limits, and settings that reduce speed."""
    facts = collect_facts(disk)
    for line in [json.dumps(facts, indent=1)] if as_json else format_facts(facts):
        print_escaped(line)
