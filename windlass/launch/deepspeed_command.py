"""The `deepspeed` command: its flags, its defaults, `--local_rank` among the script's arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from windlass.base.errors import WindlassError
from windlass.base.log import logger
from windlass.base.output import while_read
from windlass.base.process import refuse_world_writable
from windlass.launch.back_ends import is_installed
from windlass.launch.command import perform
from windlass.launch.flags import parse, take_flags
from windlass.launch.hosts import DEFAULT_HOSTFILE
from windlass.launch.request import LATE_PORT

_FLAGS = (
    *("hostfile", "include", "exclude", "num_nodes", "num_gpus", "master_port", "master_addr", "node_rank", "launcher"),
    *("launcher_args", "module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid"),
    *("enable_each_rank_log", "autotuning", "bind_cores_to_rank", "bind_core_list", "ssh_port", "venv_script"),
    *("log_level", "quiet", "elastic_training", "min_elastic_nodes", "help"),
)


def parser_of_deepspeed() -> argparse.ArgumentParser:
    """The flags of `windlass run` that the `deepspeed` command has, which may be cut short as there."""
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        usage="deepspeed [OPTION]... SCRIPT [ARGUMENT]...",
        description="Start SCRIPT as the `deepspeed` command does, by windlass.",
    )
    take_flags(parser, _FLAGS)
    parser.set_defaults(hostfile=DEFAULT_HOSTFILE)
    return parser


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's flags, with the script as `user_script` and what follows it as `user_args`."""
    given = parse(parser_of_deepspeed(), sys.argv[1:] if args is None else args)
    given.any_port, given.master_port = given.master_port is None, given.master_port or LATE_PORT
    given.user_script, given.user_args = given.words[0], given.words[1:]
    return given


def run(args: Sequence[str] | None = None) -> None:
    """What `deepspeed.launcher.runner.main` does: start, and end the process only where a rank failed.

    Differences: `--num_gpus` counts through the devices that CUDA_VISIBLE_DEVICES gives; without `--launcher`, or where
    pdsh is not installed, hosts are reached over plain ssh; a rank that a signal ended is 128 and its number; where
    nobody gave a port and 29500 is in use, ranks of this machine meet at a free one.

    Raises:
        LaunchError: it cannot be started as asked; a ValueError too where filters and numbers make no sense.
    """
    given = parse_args(args)
    given.give_local_rank = not given.no_local_rank
    given.single_is_local = True
    given.keep_store = False  # rank 0 keeps it
    given.labels = None if Path(given.hostfile).is_file() else False
    given.assumed = {"master_port": LATE_PORT} | ({"hostfile": given.hostfile} if given.labels is False else {})
    if (given.launcher or "").lower() == "pdsh" and not given.launcher_args and not is_installed("pdsh"):
        logger.warning("pdsh is not installed: plain ssh reaches the other hosts instead")
        given.launcher = None
    code = perform(given, name="deepspeed")
    if code:
        sys.exit(code)


@while_read()
def main(argv: Sequence[str] | None = None) -> None:
    """Behave as the `deepspeed` command: like `run`, and what cannot be started is one message and exit code 1."""
    refuse_world_writable()
    try:
        run(argv)
    except WindlassError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
