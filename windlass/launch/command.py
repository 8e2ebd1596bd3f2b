"""What a command that starts ranks does with its flags: which way to start them, and what is said at the end."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from windlass.base.limits import whole_number
from windlass.base.log import logger, set_level
from windlass.base.text import plural, say
from windlass.comm.slurm import port_of
from windlass.launch.back_ends import Asked, command_of, is_installed
from windlass.launch.conduct import Events, last_words
from windlass.launch.console import Console, Route
from windlass.launch.dry_run import refuse_idle, show
from windlass.launch.elastic import again_and_again
from windlass.launch.errors import LaunchError
from windlass.launch.exports import exports
from windlass.launch.flags import LAUNCHERS
from windlass.launch.fleet import start_on_hosts
from windlass.launch.local import start_here
from windlass.launch.outcome import Outcome
from windlass.launch.plan import Plan, is_this_machine
from windlass.launch.program import Program
from windlass.launch.rendezvous import start_by_rendezvous
from windlass.launch.request import LATE_PORT, plan_of, program_of, refuse, says_where, wants_rendezvous
from windlass.launch.routes import route_of
from windlass.launch.scheduled import place_given, run_as_found
from windlass.launch.ssh import Ssh, agent_path
from windlass.launch.starter import run_starter
from windlass.launch.store import port_is_free
from windlass.launch.watch import Watch


def perform(args: argparse.Namespace, env: Mapping[str, str] | None = None, name: str = "windlass run") -> int:
    """Start what `args` (of `flags.parse`) ask for, and look after it to its end.

    Args:
        env: set in the ranks' environment, over what they inherit.
        name: of the command, for what it says.

    Returns:
        The exit code: the worst of the ranks, 128 and its number for a signal.

    Raises:
        LaunchError: it cannot be started as asked.
    """
    if args.quiet or args.log_level:
        set_level("error" if args.quiet else args.log_level, "--log_level")
    refuse_idle(args)
    if args.dry_run:
        return show(args)
    with _pid_file(args.save_pid):
        return _told(_outcome(args, dict(env or {})), name)


def perform_plan(args: argparse.Namespace, plan: Plan, name: str = "deepspeed") -> int:
    """As `perform`, of a plan that is made: start this host's ranks of it, with output as `args` ask."""
    if args.quiet or args.log_level:
        set_level("error" if args.quiet else args.log_level, "--log_level")
    _check_script(plan.program)
    return _told(_shown(args, plan, start_here, here=True), name)


def _told(outcome: Outcome, name: str) -> int:
    for failure in outcome.failures:
        say(f"{name}: {failure}", to_stderr=True)
    if outcome.interrupted_by is not None:
        print(f"{name}: stopped by {signal.Signals(outcome.interrupted_by).name}, no rank is left", file=sys.stderr)
    return outcome.code


def _outcome(args: argparse.Namespace, env: dict[str, str]) -> Outcome:
    found = None if says_where(args) else place_given(os.environ)
    if found is not None:
        run_as_found(program_of(args), found, env)
    if wants_rendezvous(args):
        return start_by_rendezvous(args, program_of(args), env)
    refuse(args)
    plan = plan_of(args, env)
    launcher = (args.launcher or "ssh").lower()
    if launcher not in LAUNCHERS:
        raise LaunchError(f"--launcher {args.launcher} is unknown; choose one of {', '.join(LAUNCHERS)}")
    if _is_local(args, plan, launcher):
        return _here(args, _checked(args, plan))
    if args.nnodes and not args.hostfile and launcher != "slurm" or args.no_ssh:
        return _one_of_several(args, plan)
    plan = replace(plan, env={**exports(os.environ, os.getcwd()), **plan.env}, cwd=os.getcwd())
    return _over_ssh(args, plan) if launcher == "ssh" else _by_back_end(args, plan, launcher)


def _is_local(args: argparse.Namespace, plan: Plan, launcher: str) -> bool:
    if len(plan.hosts) > 1 or args.no_ssh:
        return False
    if launcher == "slurm" or args.force_multi:
        return False
    if args.launcher and launcher != "ssh" and not getattr(args, "single_is_local", False):
        if not args.hostfile:
            raise LaunchError(f"--launcher {args.launcher} starts ranks on other hosts, and no hostfile names any")
        return False
    return not args.hostfile or getattr(args, "single_is_local", False) or is_this_machine(plan.hosts[0].name)


def _checked(args: argparse.Namespace, plan: Plan) -> Plan:
    """Refuses what only applies to other hosts."""
    for flag in ("launcher_args", "ssh_port", "venv_script"):
        if getattr(args, flag) and not args.hostfile:
            raise LaunchError(f"--{flag} applies to other hosts, and no hostfile names any; leave it out")
    if args.node_rank > 0:
        raise LaunchError(f"--node_rank {args.node_rank} of one node; give --nnodes N, or --no_ssh with a hostfile")
    _check_script(plan.program)
    return plan


def _check_script(program: Program) -> None:
    script = program.words[0]
    if program.kind in ("script", "run_path") and not script.startswith("-") and not Path(script).exists():
        raise LaunchError(f"no such script: {script}; check the path, or give --module to name a module")


def _here(args: argparse.Namespace, plan: Plan) -> Outcome:
    if len(plan.hosts) == 1 and plan.master_addr and is_this_machine(plan.master_addr) and plan.master_port is None:
        plan = replace(plan, master_addr=None)
    if getattr(args, "any_port", False) and plan.master_port is not None and not port_is_free(plan.master_port):
        logger.warning("port %d is in use, and nobody asked for it: ranks meet at a free one", plan.master_port)
        plan = replace(plan, master_port=None)
    return again_and_again(plan, lambda plan: _shown(args, plan, start_here, here=True), args.min_nproc)


def _one_of_several(args: argparse.Namespace, plan: Plan) -> Outcome:
    """Hosts start by themselves: this one's ranks, at a place that all were told."""
    nodes = len(plan.hosts)
    if not 0 <= args.node_rank < nodes:
        raise LaunchError(
            f"--node_rank is {args.node_rank}; give each of the {nodes} hosts its number, 0 to {nodes - 1}"
        )
    if args.max_restarts:
        raise LaunchError(
            "--max-restarts where hosts start by themselves: none hears of the others; use a hostfile, "
            "or --rdzv_backend c10d"
        )
    _check_script(plan.program)
    address = plan.master_addr or (plan.hosts[0].address if args.hostfile else "127.0.0.1")
    plan = replace(plan, node=args.node_rank, master_addr=address, master_port=plan.master_port or LATE_PORT)
    return _shown(args, plan, start_here, here=True)


def _over_ssh(args: argparse.Namespace, plan: Plan) -> Outcome:
    asked = Asked(args.launcher_args)
    ssh = Ssh(args.ssh_port, tuple(asked.words), args.venv_script)
    text = ssh.agent_text(plan.env, os.getcwd())
    for host in plan.hosts:
        ssh.command(host.name, text)  # refuses names before anything is started

    def start(plan: Plan, events: Events) -> Outcome:
        return start_on_hosts(plan, lambda host: ssh.command(host.name, text), events, watched=args.watch)

    return again_and_again(plan, lambda plan: _shown(args, plan, start, here=False), args.min_nproc)


def _by_back_end(args: argparse.Namespace, plan: Plan, launcher: str) -> Outcome:
    """mpirun, srun or pdsh starts all ranks; it is itself looked after as one rank is."""
    for flag in ("log_dir", "watch", "redirects", "tee", "local_ranks_filter", "max_restarts"):
        if getattr(args, flag):
            raise LaunchError(f"--{flag} does not apply to --launcher {launcher}, which starts ranks itself; use ssh")
    if args.enable_each_rank_log != "None":
        raise LaunchError(f"--enable_each_rank_log does not apply to --launcher {launcher}; use ssh")
    address = plan.master_addr or plan.hosts[0].address
    port = _port_for_all(args, plan, launcher)
    plan = replace(plan, master_addr=address, master_port=port, keep_store=launcher == "pdsh")
    path = agent_path(plan.env.get("PYTHONPATH", ""))
    plan = replace(plan, env={**plan.env, "PYTHONPATH": path})
    ssh_words = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    words = Asked(args.launcher_args, args.ssh_port, args.venv_script, args.num_gpus, path, ssh_words)
    command = command_of(launcher, plan, words)
    if not is_installed(launcher):
        raise LaunchError(
            f"--launcher {launcher}: {command.words[0]} is not installed; plain ssh needs nothing but ssh"
        )
    ranks, hosts = plural(plan.world_size, "rank"), plural(len(plan.hosts), "host")
    logger.info("%s starts %s on %s", command.words[0], ranks, hosts)
    return run_starter(command, plan)


def _port_for_all(args: argparse.Namespace, plan: Plan, launcher: str) -> int:
    """Where ranks meet that another launcher starts; jobs of Slurm may share a host, and each has a port of its own."""
    asked = None if getattr(args, "any_port", False) else plan.master_port
    job = os.environ.get("SLURM_JOB_ID", "") if launcher == "slurm" else ""
    return asked or (port_of(int(job), 0) if whole_number(job) is not None else plan.master_port or LATE_PORT)


def _shown(args: argparse.Namespace, plan: Plan, start: Callable[[Plan, Events], Outcome], *, here: bool) -> Outcome:
    """Start a plan with its output as asked; a failure is told with the last lines of the rank that was first."""
    route, several = route_of(args), plan.world_size > 1
    labels = several if args.labels is None else args.labels
    hosts = [host.name for host in plan.hosts for _ in host.slots]
    if here and not (labels or args.watch or route != Route()):
        return start(plan, Events(None))
    locals_of = [place.local_rank for node in range(len(plan.hosts)) for place in plan.places(node)]

    def label(rank: int) -> str:
        if not labels:
            return ""
        return f"[rank {rank}] " if here else f"[rank {rank} {hosts[rank]}] "

    console = Console(route, label, locals_of.__getitem__, append=plan.restarts > 0)
    named = () if here else hosts
    events = Watch(console, named, hosts, here=here) if args.watch else Events(console, named)
    try:
        outcome = start(plan, events)
    finally:
        if isinstance(events, Watch):
            events.finish()
    for line in last_words(console, outcome, plan.world_size):
        say(line, to_stderr=True)
    return outcome


@contextlib.contextmanager
def _pid_file(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    path = Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed")
    path.write_text(str(os.getpid()))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
