"""Command `ds_elastic`: the batch size of an elastic configuration, and the numbers of ranks that can train with it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from windlass.base.broken_pipe import exit_quietly_on_broken_pipe
from windlass.base.errors import ConfigError, WindlassError
from windlass.base.text import print_escaped
from windlass.config import load_config
from windlass.config.elastic_batch import find_elastic_batch, solve_elastic_batch
from windlass.launch.launch_flags import int_between

_RULE = "-" * 42


@exit_quietly_on_broken_pipe()
def ds_elastic(argv: Sequence[str] | None = None) -> int:
    """Print the batch size and numbers of ranks of a configuration. Return the exit code: 1 if the configuration is
    invalid or not elastic, or cannot run on WORLD_SIZE ranks.

    Args:
        argv: `-c CONFIG` and `-w WORLD_SIZE`; None: the arguments of the command line.
    """
    parser = argparse.ArgumentParser(
        "ds_elastic", description="Compute the batch size of an elastic configuration, and the ranks that it fits."
    )
    parser.add_argument("-c", "--config", required=True, help="configuration with a section elasticity")
    parser.add_argument(
        "-w", "--world-size", type=int_between(0, 1 << 30), default=0, help="also solve for this number of ranks"
    )
    asked = parser.parse_args(argv)
    try:
        section = load_config(asked.config).elasticity
        if not section.enabled:
            raise ConfigError(f'{asked.config} has no "elasticity" with "enabled": true; add the section')
        found = find_elastic_batch(section)
        solved = solve_elastic_batch(section, asked.world_size) if asked.world_size > 0 else None
    except WindlassError as error:
        print_escaped(f"ds_elastic: {error}", to_stderr=True)
        return 1
    for line in (_RULE, "Elasticity config:", _RULE, json.dumps(section.model_dump(mode="json"), indent=4), _RULE):
        print_escaped(line)
    for line in ("Calculated results:", _RULE, f"final_batch_size .... {found.train}"):
        print_escaped(line)
    print_escaped(f"valid_gpus .......... {list(found.rank_counts)}")
    if solved is not None:
        print_escaped(f"micro_batch_size .... {solved.micro}")
        print_escaped(f"accumulation_steps .. {solved.accumulation}")
    return 0


def main() -> None:
    """Run `ds_elastic` and exit with its code."""
    sys.exit(ds_elastic())
