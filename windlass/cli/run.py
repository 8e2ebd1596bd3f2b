"""Command `windlass run`: starts a script on N ranks of this machine, or of several hosts."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Annotated

import typer

from windlass.compat.pid_file import pid_file
from windlass.compat.stand_in_path import stand_in_environment
from windlass.launch.launch_command import launch_from_args
from windlass.launch.launch_flags import build_run_parser, parse_flags
from windlass.launch.plan_from_flags import count_ranks


def run(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Start a script on N ranks. `launch_flags` defines all options except `--as-deepspeed`, which is added here."""
    parser = build_run_parser()
    parser.add_argument_group("DeepSpeed").add_argument(
        "--as-deepspeed",
        "--as_deepspeed",
        action="store_true",
        help="`import deepspeed` imports windlass in SCRIPT and its children, whether DeepSpeed is installed or not",
    )
    given = words or []
    args = parse_flags(parser, given)
    if args.autotuning and not args.dry_run:
        raise typer.Exit(_tune(args, given))
    with pid_file(args.save_pid and not args.dry_run):
        raise typer.Exit(launch_from_args(args, _extra_environment(args)))


def _tune(args: argparse.Namespace, given: list[str]) -> int:
    from windlass.tune.autotuning_command import flags_without_autotuning, run_autotuning

    flags = flags_without_autotuning(given[: len(given) - len(args.words)])
    launcher = [sys.executable, "-m", "windlass", "run", *flags]
    return run_autotuning(args.autotuning, launcher, args.words, count_ranks(args))


def _extra_environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables that options of this command add to the environment of the ranks, on every host."""
    return stand_in_environment(os.environ) if args.as_deepspeed else {}
