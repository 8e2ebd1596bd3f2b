"""Command `python -m deepspeed.launcher.launch`: starts the ranks of one host, given the slots (ranks) of all hosts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from windlass.base.broken_pipe import exit_quietly_on_broken_pipe
from windlass.base.errors import WindlassError
from windlass.launch.hostfile import decode_world_info
from windlass.launch.launch_command import launch_plan_from_args
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_flags import copy_flags, parse_flags
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.plan_from_flags import DEFAULT_MASTER_PORT, program_from_args
from windlass.launch.rank_placement import Host

_FLAGS = (
    *("node_rank", "master_addr", "master_port", "module", "no_python", "no_local_rank", "enable_each_rank_log"),
    *("bind_cores_to_rank", "bind_core_list", "log_level", "quiet", "help"),
)


def build_node_parser() -> argparse.ArgumentParser:
    """Return a parser with the flags of DeepSpeed's single-host launcher."""
    parser = argparse.ArgumentParser(
        prog="deepspeed.launcher.launch",
        usage="python -m deepspeed.launcher.launch --world_info=TEXT [OPTION]... SCRIPT [ARGUMENT]...",
        description="Start the ranks of one host with windlass.",
    )
    copy_flags(parser, _FLAGS)
    text = "base64 of the JSON {host: [slot, ...]}, hosts in the order of ranks"
    parser.add_argument("--world_info", required=True, metavar="TEXT", help=text)
    parser.add_argument(
        "--save_pid",
        type=int,
        default=0,
        metavar="PID",
        help="accepted and ignored; the `deepspeed` command writes the PID file",
    )
    parser.set_defaults(node_rank=0, master_addr="127.0.0.1", master_port=DEFAULT_MASTER_PORT)
    return parser


def node_plan_from_args(args: argparse.Namespace) -> LaunchPlan:
    """Build the launch plan from the flags.

    Raises:
        LaunchError: `--world_info` is malformed, or has no host or no slots for `--node_rank`.
    """
    hosts = tuple(Host(name, tuple(slots)) for name, slots in decode_world_info(args.world_info).items())
    if not 0 <= args.node_rank < len(hosts) or not hosts[args.node_rank].slots:
        raise LaunchError(
            f"--node_rank {args.node_rank}: --world_info has no slots for this host; pass the number of one of its "
            f"{len(hosts)} hosts, counted from 0"
        )
    args.give_local_rank = not args.no_local_rank
    return LaunchPlan(
        program_from_args(args),
        hosts,
        node_rank=args.node_rank,
        master_addr=args.master_addr,
        master_port=args.master_port,
        use_agent_store=False,
        use_devices=True,
        bind_cores_to_rank=args.bind_cores_to_rank,
        bind_core_list=args.bind_core_list,
        grace_s=args.grace,
    )


@exit_quietly_on_broken_pipe()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. A launch error prints one message and exits with status 1."""
    args = parse_flags(build_node_parser(), sys.argv[1:] if argv is None else argv)
    args.labels = False
    try:
        code = launch_plan_from_args(args, node_plan_from_args(args))
    except WindlassError as error:
        print(f"deepspeed.launcher.launch: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    if code:
        sys.exit(code)
