"""`windlass run`: starts any script on N ranks of this machine, or of several hosts."""

from __future__ import annotations

import argparse
from typing import Annotated

import typer

from windlass.launch.command import perform
from windlass.launch.flags import parse, parser_of_run


def run(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Start a script on N ranks; the flags are `launch.flags`', with the environment that this command adds."""
    args = parse(parser_of_run(), words or [])
    raise typer.Exit(perform(args, _environment(args)))


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """What flags of this command set in the ranks' environment, on every host."""
    return {}
