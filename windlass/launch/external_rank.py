"""Rank started by another launcher (srun, mpirun, torchrun): reads its rank and becomes the user's program.

For a plan of `windlass run`, MPI and Slurm start `python -m windlass.launch.external_rank PLAN`, where PLAN is the
result of `encode_plan`.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import zlib
from collections.abc import Mapping
from typing import NoReturn

from windlass.base.errors import WindlassError
from windlass.comm.rank_environment import HERE, SLURM, RankEnvironment, rank_environment
from windlass.comm.slurm import is_step
from windlass.launch import core_binding as own_cores
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.plan_from_flags import DEFAULT_MASTER_PORT
from windlass.launch.program import Program
from windlass.launch.rank_jobs import make_rank_jobs

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def external_rank_environment(environ: Mapping[str, str]) -> RankEnvironment | None:
    """Return this process's rank environment, or None unless another launcher (torchrun, MPI, Slurm) started it.

    Raises:
        CommunicationError: a variable is missing or invalid, or the rank is not below the number of ranks.
    """
    # use torchrun's variables only if all are set: a single one is left over from another program
    full = all(environ.get(name) for name in _TORCHRUN_VARIABLES)
    place = rank_environment(
        environ if full else {name: environ[name] for name in environ if name not in _TORCHRUN_VARIABLES}
    )
    if place is None or place.local_rank is None:
        return None
    # A batch script of Slurm has the variables of a task, but runs in no job step and is not a rank. In a job step of
    # one task, windlass starts the ranks itself.
    if place.source == SLURM and (place.world == 1 or not is_step(environ)):
        return None
    return place


def torchrun_environment(rank_environment: RankEnvironment) -> dict[str, str]:
    """Return the variables that torchrun would set for this rank.

    Raises:
        LaunchError: ranks are on several hosts, and no variable gives the address of rank 0.
    """
    master = rank_environment.master or (HERE if rank_environment.world in (1, rank_environment.local_world) else None)
    if master is None:
        raise LaunchError(
            f"{rank_environment.source} started rank {rank_environment.rank} of {rank_environment.world} on several "
            "hosts, and MASTER_ADDR is not set; set it to the host of rank 0"
        )
    values = {
        "RANK": rank_environment.rank,
        "WORLD_SIZE": rank_environment.world,
        "LOCAL_RANK": rank_environment.local_rank,
        "LOCAL_WORLD_SIZE": rank_environment.local_world,
        "MASTER_ADDR": master,
        "MASTER_PORT": rank_environment.port or DEFAULT_MASTER_PORT,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def exec_as_external_rank(program: Program, rank_environment: RankEnvironment, env: Mapping[str, str]) -> NoReturn:
    """Replace this process by the program, which runs as the rank of `rank_environment`.

    Raises:
        LaunchError: the program cannot be executed.
    """
    _exec_command(
        program.argv_for_rank(rank_environment.local_rank or 0),
        {**os.environ, **env, **torchrun_environment(rank_environment)},
    )


def encode_plan(plan: LaunchPlan) -> str:
    """Encode a plan as one word without characters that a shell interprets."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(plan.to_json()).encode(), 9)).decode()


def decode_plan(text: str) -> LaunchPlan:
    """Decode the result of `encode_plan`."""
    return LaunchPlan.from_json(json.loads(zlib.decompress(base64.urlsafe_b64decode(text))))


def main(encoded: str) -> NoReturn:
    """Replace this process by its rank of the plan that `encoded` holds.

    Raises:
        LaunchError: no variable gives the rank, the launcher placed ranks differently from the plan, or the program
            cannot be executed.
    """
    plan = decode_plan(encoded)
    found = rank_environment({name: value for name, value in os.environ.items() if name not in _TORCHRUN_VARIABLES})
    if found is None:
        raise LaunchError("no variable of MPI or Slurm gives the rank of this process; start it by mpirun or srun")
    places = [place for node in range(len(plan.hosts)) for place in plan.rank_placements(node)]
    if found.world != len(places):
        raise LaunchError(f"{found.source} started {found.world} ranks, the plan has {len(places)}; start that many")
    place = places[found.rank]
    if found.local_rank not in (None, place.local_rank):
        raise LaunchError(
            f"{found.source} made rank {found.rank} the local rank {found.local_rank}, and by the order of hosts it is "
            f"{place.local_rank} on {place.host}; have hosts filled one after the other (--map-by slot, -m block)"
        )
    if plan.cwd is not None:
        os.chdir(plan.cwd)
    assert plan.master_addr is not None and plan.master_port is not None
    job = make_rank_jobs(plan, place.node_rank, (plan.master_addr, plan.master_port))[place.local_rank]
    if job.env.get(own_cores.CORES_VARIABLE):
        os.sched_setaffinity(0, [int(core) for core in job.env[own_cores.CORES_VARIABLE].split(",")])
    _exec_command(job.argv, job.env)


def _exec_command(argv: list[str], env: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], argv, dict(env))
    except OSError as error:
        raise LaunchError(f"{argv[0]}: {error.strerror}") from None


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except WindlassError as error:
        print(f"windlass: {error}", file=sys.stderr)
        sys.exit(1)
