"""Command `deepspeed`: DeepSpeed's flags and defaults, with `--local_rank` added to the script's arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from windlass.base.broken_pipe import exit_quietly_on_broken_pipe
from windlass.base.errors import WindlassError
from windlass.base.log import logger
from windlass.base.processes import exit_on_interrupted_import, forbid_world_writable_files
from windlass.compat.pid_file import pid_file
from windlass.launch.hostfile import DEFAULT_HOSTFILE
from windlass.launch.launch_command import launch_from_args
from windlass.launch.launch_flags import copy_flags, parse_flags
from windlass.launch.launcher_backends import is_installed
from windlass.launch.plan_from_flags import DEFAULT_MASTER_PORT, count_ranks

_FLAGS = (
    *("hostfile", "include", "exclude", "num_nodes", "num_gpus", "master_port", "master_addr", "node_rank", "launcher"),
    *("launcher_args", "module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid"),
    *("enable_each_rank_log", "autotuning", "bind_cores_to_rank", "bind_core_list", "ssh_port", "venv_script"),
    *("log_level", "quiet", "elastic_training", "min_elastic_nodes", "help"),
)


def build_deepspeed_parser() -> argparse.ArgumentParser:
    """Return a parser with those flags of `windlass run` that the `deepspeed` command has. Flags may be abbreviated."""
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        usage="deepspeed [OPTION]... SCRIPT [ARGUMENT]...",
        description="Start SCRIPT with windlass, as the `deepspeed` command does.",
    )
    copy_flags(parser, _FLAGS)
    parser.set_defaults(hostfile=DEFAULT_HOSTFILE)
    return parser


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's flags. The script is in `user_script`, and the words after it are in `user_args`."""
    given = parse_flags(build_deepspeed_parser(), sys.argv[1:] if args is None else args)
    given.any_port, given.master_port = given.master_port is None, given.master_port or DEFAULT_MASTER_PORT
    given.user_script, given.user_args = given.words[0], given.words[1:]
    return given


def run(args: Sequence[str] | None = None) -> None:
    """Start a script in the way `deepspeed.launcher.runner.main` does. Exit the process only if a rank failed.

    Differences from DeepSpeed: `--num_gpus` selects among the devices in CUDA_VISIBLE_DEVICES. Without `--launcher`, or
    if pdsh is not installed, hosts are reached over plain ssh. The exit status of a rank ended by a signal is 128 plus
    the signal's number. If no port is given and 29500 is in use, a single-node run uses a free port.

    Raises:
        LaunchError: the flags cannot be honoured. For inconsistent filters or numbers, the error is also a
            ValueError.
    """
    words = list(sys.argv[1:] if args is None else args)
    given = parse_args(words)
    if given.autotuning:
        if code := _tune(given, words):
            sys.exit(code)
        return
    given.give_local_rank = not given.no_local_rank
    given.single_is_local = True
    given.keep_store = False  # rank 0, not the launcher, hosts the rendezvous store
    given.labels = None if Path(given.hostfile).is_file() else False
    given.assumed = {"master_port": DEFAULT_MASTER_PORT} | (
        {"hostfile": given.hostfile} if given.labels is False else {}
    )
    if (given.launcher or "").lower() == "pdsh" and not given.launcher_args and not is_installed("pdsh"):
        logger.warning("pdsh is not installed: using plain ssh to reach the other hosts")
        given.launcher = None
    with pid_file(given.save_pid):
        code = launch_from_args(given, command_name="deepspeed")
    if code:
        sys.exit(code)


def _tune(given: argparse.Namespace, words: list[str]) -> int:
    # The search needs the configuration's schema, which takes longer to import than the launcher.
    from windlass.tune.autotuning_command import flags_without_autotuning, run_autotuning

    flags = flags_without_autotuning(words[: len(words) - len(given.words)])
    launcher = [sys.executable, "-m", "windlass.compat.deepspeed_command", *flags]
    return run_autotuning(given.autotuning, launcher, given.words, count_ranks(given))


@exit_quietly_on_broken_pipe()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the `deepspeed` command: `run`, but a launch error prints one message and exits with status 1."""
    forbid_world_writable_files()
    try:
        with exit_on_interrupted_import():
            run(argv)
    except WindlassError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
