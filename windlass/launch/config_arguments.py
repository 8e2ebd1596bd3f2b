"""Command line options that training scripts pass on to `windlass.initialize(args=...)`."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that `initialize(args=...)` reads to a script's `parser`, and return it.

    The options have DeepSpeed's names: `--deepspeed_config PATH`, the configuration, and `--deepspeed`, a flag for the
    script's own use.
    """
    group = parser.add_argument_group("windlass", "sharded training")
    group.add_argument("--deepspeed", action="store_true", help="train with windlass (read by the script)")
    group.add_argument("--deepspeed_config", metavar="PATH", help="configuration of the run: a ds_config.json")
    return parser
