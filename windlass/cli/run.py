"""`windlass run`: starts any script on N ranks of this machine, or of several hosts."""

from __future__ import annotations

import argparse
import os
from typing import Annotated

import typer

from windlass.compat.stand_in_path import stand_in_environment
from windlass.launch.launch_command import launch_from_args
from windlass.launch.launch_flags import build_run_parser, parse_flags


def run(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Start a script on N ranks; the flags are `launch.flags`', with the environment that this command adds."""
    parser = build_run_parser()
    parser.add_argument_group("DeepSpeed").add_argument(
        "--as-deepspeed",
        "--as_deepspeed",
        action="store_true",
        help="`import deepspeed` is windlass in SCRIPT and in what it starts, whether DeepSpeed is installed or not",
    )
    args = parse_flags(parser, words or [])
    raise typer.Exit(launch_from_args(args, _extra_environment(args)))


def _extra_environment(args: argparse.Namespace) -> dict[str, str]:
    """What flags of this command set in the ranks' environment, on every host."""
    return stand_in_environment(os.environ) if args.as_deepspeed else {}
