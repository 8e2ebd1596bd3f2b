"""`windlass env`: what a bug report needs to know about this machine; says what is missing and never fails for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from windlass.base.text import print_escaped
from windlass.cli.environment.collect_facts import collect_facts
from windlass.cli.environment.format_facts import format_facts


def env(
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON, on stdout.")] = False,
    disk: Annotated[
        Path | None, typer.Option("--disk", metavar="FOLDER", help="Measure the disk that this folder is on.")
    ] = None,
) -> None:
    """Print versions, devices and how they are connected, ways between ranks, limits, and settings that cost speed."""
    facts = collect_facts(disk)
    for line in [json.dumps(facts, indent=1)] if as_json else format_facts(facts):
        print_escaped(line)
