"""Execution of a launch command: chooses the launcher for the given flags, runs it, and reports failures."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from windlass.base.bounded_input import parse_int
from windlass.base.log import logger, set_log_level
from windlass.base.text import plural, print_escaped
from windlass.comm.slurm import port_of
from windlass.launch.dry_run import reject_dry_run_flags, show_rank_map
from windlass.launch.elastic_restart import run_with_restarts
from windlass.launch.exit_status import LaunchExitStatus
from windlass.launch.exported_environment import exported_environment
from windlass.launch.external_rank import exec_as_external_rank, external_rank_environment
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_flags import LAUNCHERS
from windlass.launch.launch_plan import LaunchPlan, is_local_host
from windlass.launch.launcher_backends import (
    LauncherOptions,
    build_launcher_command,
    identifying_program,
    is_installed,
)
from windlass.launch.launcher_process import run_launcher_command
from windlass.launch.live_rank_table import LiveRankTable
from windlass.launch.local_launch import free_port, start_local_ranks
from windlass.launch.output_flags import output_routing_from_args
from windlass.launch.plan_from_flags import (
    DEFAULT_MASTER_PORT,
    has_placement_flags,
    needs_rendezvous,
    plan_from_args,
    program_from_args,
    reject_unsupported_flags,
)
from windlass.launch.program import Program
from windlass.launch.rank_output import OutputRouting, RankConsole
from windlass.launch.remote_launch import start_on_hosts
from windlass.launch.rendezvous_store import is_port_free
from windlass.launch.source_path import source_pythonpath
from windlass.launch.ssh_connection import SshConnectionOptions
from windlass.launch.supervisor import RankEvents, failure_output_lines
from windlass.launch.torch_agent import start_with_torch_agent


def launch_from_args(
    args: argparse.Namespace, env: Mapping[str, str] | None = None, command_name: str = "windlass run"
) -> int:
    """Start the ranks that `args` (the result of `parse_flags`) describe, and supervise them to their end.

    With `--dry-run` only show their placement. If another launcher started this process as a rank, the
    process is replaced by the user's program, and the call does not return.

    Args:
        env: variables to set in the environment of the ranks, over inherited ones.
        command_name: name of the command in messages.

    Returns:
        The worst exit code of the ranks; 128 plus the number of a signal that ended a rank, or that this process
        received.

    Raises:
        LaunchError: the ranks cannot be started as requested.
        ConfigError: the log level is unknown, or a dry run cannot read the configuration or the model shape.
    """
    if args.quiet or args.log_level:
        set_log_level("error" if args.quiet else args.log_level, "--log_level")
    reject_dry_run_flags(args)
    if args.dry_run:
        return show_rank_map(args)
    return _report_failures(_choose_launch(args, dict(env or {})), command_name)


def launch_plan_from_args(args: argparse.Namespace, plan: LaunchPlan, command_name: str = "deepspeed") -> int:
    """Start this host's ranks of a finished plan, with output as set by `args`. See `launch_from_args`."""
    if args.quiet or args.log_level:
        set_log_level("error" if args.quiet else args.log_level, "--log_level")
    _check_script(plan.program)
    return _report_failures(_launch_with_output(args, plan, start_local_ranks, is_local=True), command_name)


def _report_failures(status: LaunchExitStatus, command_name: str) -> int:
    for failure in status.failures:
        print_escaped(f"{command_name}: {failure}", to_stderr=True)
    if status.interrupted_by is not None:
        print(
            f"{command_name}: stopped by {signal.Signals(status.interrupted_by).name}, all ranks have ended",
            file=sys.stderr,
        )
    return status.exit_code


def _choose_launch(args: argparse.Namespace, env: dict[str, str]) -> LaunchExitStatus:
    found = None if has_placement_flags(args) else external_rank_environment(os.environ)
    if found is not None:
        exec_as_external_rank(program_from_args(args), found, env)
    if needs_rendezvous(args):
        return start_with_torch_agent(args, program_from_args(args), env)
    reject_unsupported_flags(args)
    plan = plan_from_args(args, env)
    launcher = (args.launcher or "ssh").lower()
    if launcher not in LAUNCHERS:
        raise LaunchError(f"--launcher {args.launcher} is unknown; choose one of {', '.join(LAUNCHERS)}")
    if _is_local(args, plan, launcher):
        return _launch_locally(args, _check_local_plan(args, plan))
    if args.nnodes and not args.hostfile and launcher != "slurm" or args.no_ssh:
        return _launch_one_node(args, plan)
    plan = replace(plan, env={**exported_environment(os.environ, os.getcwd()), **plan.env}, cwd=os.getcwd())
    return _launch_over_ssh(args, plan) if launcher == "ssh" else _launch_with_backend(args, plan, launcher)


def _is_local(args: argparse.Namespace, plan: LaunchPlan, launcher: str) -> bool:
    if len(plan.hosts) > 1 or args.no_ssh:
        return False
    if launcher == "slurm" or args.force_multi:
        return False
    if args.launcher and launcher != "ssh" and not getattr(args, "single_is_local", False):
        if not args.hostfile and launcher == "pdsh":
            raise LaunchError(f"--launcher {args.launcher} starts ranks on other hosts, and no hostfile names any")
        return False  # the requested launcher starts the ranks, even if all are on this machine
    return not args.hostfile or getattr(args, "single_is_local", False) or is_local_host(plan.hosts[0].name)


def _check_local_plan(args: argparse.Namespace, plan: LaunchPlan) -> LaunchPlan:
    """Check a plan for this machine. Reject flags that apply only to other hosts."""
    for flag in ("launcher_args", "ssh_port", "venv_script"):
        if getattr(args, flag) and not args.hostfile:
            raise LaunchError(f"--{flag} applies to other hosts, and no hostfile names any; leave it out")
    if args.node_rank > 0:
        raise LaunchError(f"--node_rank {args.node_rank} of one node; give --nnodes N, or --no_ssh with a hostfile")
    _check_script(plan.program)
    return plan


def _check_script(program: Program) -> None:
    script = program.argv[0]
    if program.kind in ("script", "run_path") and not script.startswith("-") and not Path(script).exists():
        raise LaunchError(f"no such script: {script}; check the path, or give --module to name a module")


def _launch_locally(args: argparse.Namespace, plan: LaunchPlan) -> LaunchExitStatus:
    if len(plan.hosts) == 1 and plan.master_addr and is_local_host(plan.master_addr) and plan.master_port is None:
        plan = replace(plan, master_addr=None)
    if getattr(args, "any_port", False) and plan.master_port is not None and not is_port_free(plan.master_port):
        logger.warning("the default port %d is in use: a free one is used", plan.master_port)
        plan = replace(plan, master_port=None)
    return run_with_restarts(
        plan, lambda plan: _launch_with_output(args, plan, start_local_ranks, is_local=True), args.min_nproc
    )


def _launch_one_node(args: argparse.Namespace, plan: LaunchPlan) -> LaunchExitStatus:
    """Start only the ranks of this host. The other hosts run the same command, with the same master address."""
    nodes = len(plan.hosts)
    if not 0 <= args.node_rank < nodes:
        raise LaunchError(
            f"--node_rank is {args.node_rank}; give each of the {nodes} hosts its number, 0 to {nodes - 1}"
        )
    if args.max_restarts:
        raise LaunchError(
            "--max-restarts is not possible if each host is started separately, because no host receives the failures "
            "of others; use a hostfile, or --rdzv_backend c10d"
        )
    _check_script(plan.program)
    address = plan.master_addr or (plan.hosts[0].address if args.hostfile else "127.0.0.1")
    plan = replace(
        plan, node_rank=args.node_rank, master_addr=address, master_port=plan.master_port or DEFAULT_MASTER_PORT
    )
    return _launch_with_output(args, plan, start_local_ranks, is_local=True)


def _launch_over_ssh(args: argparse.Namespace, plan: LaunchPlan) -> LaunchExitStatus:
    requested = LauncherOptions(args.launcher_args)
    ssh = SshConnectionOptions(args.ssh_port, tuple(requested.launcher_argv), args.venv_script)
    text = ssh.agent_shell_command(plan.env, os.getcwd())
    for host in plan.hosts:
        ssh.ssh_argv(host.name, text)  # rejects invalid host names before anything is started

    def start(plan: LaunchPlan, events: RankEvents) -> LaunchExitStatus:
        return start_on_hosts(plan, lambda host: ssh.ssh_argv(host.name, text), events, reports_memory=args.watch)

    return run_with_restarts(plan, lambda plan: _launch_with_output(args, plan, start, is_local=False), args.min_nproc)


def _launch_with_backend(args: argparse.Namespace, plan: LaunchPlan, launcher: str) -> LaunchExitStatus:
    """Start all ranks by mpirun, srun or pdsh, and supervise that program as if it were one rank."""
    for flag in ("log_dir", "watch", "redirects", "tee", "local_ranks_filter", "max_restarts"):
        if getattr(args, flag):
            raise LaunchError(f"--{flag} does not apply to --launcher {launcher}, which starts ranks itself; use ssh")
    if args.enable_each_rank_log != "None":
        raise LaunchError(f"--enable_each_rank_log does not apply to --launcher {launcher}; use ssh")
    address = plan.master_addr or plan.hosts[0].address
    port = _choose_master_port(args, plan, launcher)
    plan = replace(plan, master_addr=address, master_port=port, use_agent_store=launcher == "pdsh")
    path = source_pythonpath(plan.env.get("PYTHONPATH", ""))
    plan = replace(plan, env={**plan.env, "PYTHONPATH": path})
    ssh_words = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    words = LauncherOptions(args.launcher_args, args.ssh_port, args.venv_script, args.num_gpus, path, ssh_words)
    command = build_launcher_command(launcher, plan, words)
    if not is_installed(launcher):
        raise LaunchError(
            f"--launcher {launcher}: {identifying_program(launcher)} is in no folder of PATH; activate the environment "
            "in which it is installed, or leave out --launcher: the default launcher needs only ssh"
        )
    ranks, hosts = plural(plan.world_size, "rank"), plural(len(plan.hosts), "host")
    logger.info("%s starts %s on %s", command.argv[0], ranks, hosts)
    return run_launcher_command(command, plan)


def _choose_master_port(args: argparse.Namespace, plan: LaunchPlan, launcher: str) -> int:
    """Return the rendezvous port for ranks of another launcher. Slurm jobs on one host need different ports."""
    requested = None if getattr(args, "any_port", False) else plan.master_port
    if requested is None and not args.hostfile and launcher not in ("slurm", "pdsh"):
        return free_port()  # all ranks are on this machine
    job = os.environ.get("SLURM_JOB_ID", "") if launcher == "slurm" else ""
    return requested or (
        port_of(int(job), 0) if parse_int(job) is not None else plan.master_port or DEFAULT_MASTER_PORT
    )


def _launch_with_output(
    args: argparse.Namespace,
    plan: LaunchPlan,
    start: Callable[[LaunchPlan, RankEvents], LaunchExitStatus],
    *,
    is_local: bool,
) -> LaunchExitStatus:
    """Start a plan with output as requested. After a failure, print the last lines of the rank that failed first."""
    route, several = output_routing_from_args(args), plan.world_size > 1
    labels = several if args.labels is None else args.labels
    hosts = [host.name for host in plan.hosts for _ in host.slots]
    if is_local and not (labels or args.watch or route != OutputRouting()):
        return start(plan, RankEvents(None, workers=plan.workers))
    locals_of = [place.local_rank for node in range(len(plan.hosts)) for place in plan.rank_placements(node)]

    def label(rank: int) -> str:
        if not labels:
            return ""
        return f"[rank {rank}] " if is_local else f"[rank {rank} {hosts[rank]}] "

    console = RankConsole(route, label, locals_of.__getitem__, append=plan.restarts > 0)
    named = () if is_local else hosts
    events: RankEvents
    if args.watch:
        events = LiveRankTable(console, named, hosts, is_local=is_local, workers=plan.workers)
    else:
        events = RankEvents(console, named, plan.workers)
    try:
        outcome = start(plan, events)
    finally:
        if isinstance(events, LiveRankTable):
            events.close()
    for line in failure_output_lines(console, outcome, plan.world_size):
        print_escaped(line, to_stderr=True)
    return outcome
