"""Starts a program on N local ranks, and brings back how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from windlass.base.limits import MOST_RANKS_OF_A_HOST
from windlass.base.log import logger as logger
from windlass.launch.conduct import Events
from windlass.launch.errors import LaunchError as LaunchError
from windlass.launch.jobs import threads_per_rank as threads_per_rank
from windlass.launch.local import check_main_thread, check_port, start_here
from windlass.launch.outcome import Outcome
from windlass.launch.place import Host
from windlass.launch.plan import Plan
from windlass.launch.program import Program


def launch(
    entrypoint: list[str],
    nproc: int,
    *,
    module: bool = False,
    env: Mapping[str, str] | None = None,
    grace_s: float = 30,
) -> int:
    """Run `entrypoint` on `nproc` ranks of this machine; what failures there are is theirs to print.

    Args:
        entrypoint: what follows `python`: a script and its arguments (or `-m module ...`).
        nproc: number of ranks.
        module: the first word of `entrypoint` is a module's name.
        env: set in the ranks' environment, over what they inherit.
        grace_s: seconds that ranks have to end after Ctrl-C, before they are killed.

    Returns:
        The worst exit code of the ranks, 128 + its number for a signal that ended one, or that this process was sent.

    Raises:
        LaunchError: the ranks cannot be started.
    """
    return start(entrypoint, nproc, module=module, env=env, grace_s=grace_s).code


def start(
    entrypoint: list[str],
    nproc: int,
    *,
    module: bool = False,
    master_port: int | None = None,
    env: Mapping[str, str] | None = None,
    grace_s: float = 30,
) -> Outcome:
    """Like `launch`, but tells which ranks failed too, and takes the port at which they meet (by default a free one).

    Ranks die with this process, even if it is killed (Linux). SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to them
    with `grace_s` seconds to end. Only in the main thread, whose signals these are.
    """
    plan = plan_here(entrypoint, nproc, module=module, master_port=master_port, env=env, grace_s=grace_s)
    return start_here(plan, Events(None))


def plan_here(
    entrypoint: list[str],
    nproc: int,
    *,
    module: bool = False,
    master_port: int | None = None,
    env: Mapping[str, str] | None = None,
    grace_s: float = 30,
) -> Plan:
    """The plan of `start`, checked."""
    if not entrypoint:
        raise LaunchError("nothing to run: name a script, or a module with --module")
    if not 1 <= nproc <= MOST_RANKS_OF_A_HOST:
        raise LaunchError(f"--nproc is {nproc}; give a number of ranks from 1 to {MOST_RANKS_OF_A_HOST:,}")
    if not module and not entrypoint[0].startswith("-") and not Path(entrypoint[0]).exists():
        raise LaunchError(f"no such script: {entrypoint[0]}; check the path, or give --module to name a module")
    check_main_thread()
    if master_port is not None:
        check_port(master_port)
    return Plan(
        Program(tuple(entrypoint), "module" if module else "script"),
        (Host("localhost", tuple(range(nproc))),),
        env=dict(env or {}),
        master_port=master_port,
        grace_s=grace_s,
    )
