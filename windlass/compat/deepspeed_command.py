"""The `deepspeed` command: its flags, its defaults, `--local_rank` among the script's arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from windlass.base.broken_pipe import exit_quietly_on_broken_pipe
from windlass.base.errors import WindlassError
from windlass.base.log import logger
from windlass.base.processes import forbid_world_writable_files
from windlass.launch.hostfile import DEFAULT_HOSTFILE
from windlass.launch.launch_command import launch_from_args
from windlass.launch.launch_flags import copy_flags, parse_flags
from windlass.launch.launcher_backends import is_installed
from windlass.launch.plan_from_flags import DEFAULT_MASTER_PORT

_FLAGS = (
    *("hostfile", "include", "exclude", "num_nodes", "num_gpus", "master_port", "master_addr", "node_rank", "launcher"),
    *("launcher_args", "module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid"),
    *("enable_each_rank_log", "autotuning", "bind_cores_to_rank", "bind_core_list", "ssh_port", "venv_script"),
    *("log_level", "quiet", "elastic_training", "min_elastic_nodes", "help"),
)


def build_deepspeed_parser() -> argparse.ArgumentParser:
    """The flags of `windlass run` that the `deepspeed` command has, which may be cut short as there."""
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        usage="deepspeed [OPTION]... SCRIPT [ARGUMENT]...",
        description="Start SCRIPT as the `deepspeed` command does, by windlass.",
    )
    copy_flags(parser, _FLAGS)
    parser.set_defaults(hostfile=DEFAULT_HOSTFILE)
    return parser


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's flags, with the script as `user_script` and what follows it as `user_args`."""
    given = parse_flags(build_deepspeed_parser(), sys.argv[1:] if args is None else args)
    given.any_port, given.master_port = given.master_port is None, given.master_port or DEFAULT_MASTER_PORT
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
    given.assumed = {"master_port": DEFAULT_MASTER_PORT} | (
        {"hostfile": given.hostfile} if given.labels is False else {}
    )
    if (given.launcher or "").lower() == "pdsh" and not given.launcher_args and not is_installed("pdsh"):
        logger.warning("pdsh is not installed: plain ssh reaches the other hosts instead")
        given.launcher = None
    code = launch_from_args(given, command_name="deepspeed")
    if code:
        sys.exit(code)


@exit_quietly_on_broken_pipe()
def main(argv: Sequence[str] | None = None) -> None:
    """Behave as the `deepspeed` command: like `run`, and what cannot be started is one message and exit code 1."""
    forbid_world_writable_files()
    try:
        run(argv)
    except WindlassError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
