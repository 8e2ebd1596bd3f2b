"""Start of a program on N local ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from windlass.base.bounded_input import MAX_RANKS_PER_HOST
from windlass.base.log import logger as logger
from windlass.launch.exit_status import LaunchExitStatus
from windlass.launch.launch_errors import LaunchError as LaunchError
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.local_launch import check_main_thread, check_port, start_local_ranks
from windlass.launch.program import Program
from windlass.launch.rank_jobs import threads_per_rank as threads_per_rank
from windlass.launch.rank_placement import Host
from windlass.launch.supervisor import RankEvents


def launch(
    entrypoint: list[str],
    nproc: int,
    *,
    module: bool = False,
    env: Mapping[str, str] | None = None,
    grace_s: float = 30,
) -> int:
    """Run `entrypoint` on `nproc` ranks of this machine. The ranks print their own failures.

    Args:
        entrypoint: arguments of `python`: a script and its arguments (or `-m module ...`).
        nproc: number of ranks.
        module: the first word of `entrypoint` is the name of a module.
        env: variables to set in the environment of the ranks, over inherited ones.
        grace_s: seconds that ranks have to end after Ctrl-C or another rank's failure, before they are killed.

    Returns:
        The worst exit code of the ranks; 128 plus the number of a signal that ended a rank or reached this process.

    Raises:
        LaunchError: the ranks cannot be started.
    """
    return start_ranks(entrypoint, nproc, module=module, env=env, grace_s=grace_s).exit_code


def start_ranks(
    entrypoint: list[str],
    nproc: int,
    *,
    module: bool = False,
    master_port: int | None = None,
    env: Mapping[str, str] | None = None,
    grace_s: float = 30,
) -> LaunchExitStatus:
    """Start ranks like `launch`, and return the failures of the ranks too. By default a free `master_port` is chosen.

    Ranks die with this process, even if it is killed (Linux). SIGINT, SIGTERM, SIGHUP and SIGQUIT are forwarded to
    them, with `grace_s` seconds to end. The call must be in the main thread, the only thread that receives signals.
    """
    plan = plan_local_launch(entrypoint, nproc, module=module, master_port=master_port, env=env, grace_s=grace_s)
    return start_local_ranks(plan, RankEvents(None))


def plan_local_launch(
    entrypoint: list[str],
    nproc: int,
    *,
    module: bool = False,
    master_port: int | None = None,
    env: Mapping[str, str] | None = None,
    grace_s: float = 30,
) -> LaunchPlan:
    """Build and check the plan of `start_ranks`.

    Raises:
        LaunchError: the script does not exist, `nproc` or the port is invalid, the port is in use, or the caller is not
            the main thread.
    """
    if not entrypoint:
        raise LaunchError("nothing to run: name a script, or a module with --module")
    if not 1 <= nproc <= MAX_RANKS_PER_HOST:
        raise LaunchError(f"--nproc is {nproc}; give a number of ranks from 1 to {MAX_RANKS_PER_HOST:,}")
    if not module and not entrypoint[0].startswith("-") and not Path(entrypoint[0]).exists():
        raise LaunchError(f"no such script: {entrypoint[0]}; check the path, or give --module to name a module")
    check_main_thread()
    if master_port is not None:
        check_port(master_port)
    return LaunchPlan(
        Program(tuple(entrypoint), "module" if module else "script"),
        (Host("localhost", tuple(range(nproc))),),
        env=dict(env or {}),
        master_port=master_port,
        grace_s=grace_s,
    )
