"""`windlass run`: starts any script on N ranks of this machine, or of several hosts."""

from __future__ import annotations

import argparse
import os
from typing import Annotated

import typer

from windlass.compat.place import environment
from windlass.launch.command import perform
from windlass.launch.flags import parse, parser_of_run


def run(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Start a script on N ranks; the flags are `launch.flags`', with the environment that this command adds."""
    parser = parser_of_run()
    parser.add_argument_group("DeepSpeed").add_argument(
        "--as-deepspeed",
        "--as_deepspeed",
        action="store_true",
        help="`import deepspeed` is windlass in SCRIPT and in what it starts, whether DeepSpeed is installed or not",
    )
    args = parse(parser, words or [])
    raise typer.Exit(perform(args, _environment(args)))


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """What flags of this command set in the ranks' environment, on every host."""
    return environment(os.environ) if args.as_deepspeed else {}
