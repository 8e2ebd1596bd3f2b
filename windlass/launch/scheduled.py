"""A rank that somebody else started (srun, mpirun, torchrun): it reads its place and becomes the user's program.

`python -m windlass.launch.scheduled PLAN`, where PLAN is what `encode` made, is what MPI and Slurm start for a plan of
`windlass run`.
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
from windlass.comm.launchers import HERE, SLURM, Place, place_of
from windlass.comm.slurm import is_step
from windlass.launch import cores as own_cores
from windlass.launch.errors import LaunchError
from windlass.launch.jobs import jobs_of
from windlass.launch.plan import Plan
from windlass.launch.program import Program
from windlass.launch.request import LATE_PORT

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def place_given(environ: Mapping[str, str]) -> Place | None:
    """This process's place, if another launcher started several and said all that a rank needs: torchrun, MPI, Slurm.

    Raises:
        CommunicationError: a variable is not what it should be.
    """
    whole = all(environ.get(name) for name in _OF_TORCHRUN)  # one of them alone was left by somebody
    place = place_of(environ if whole else {name: environ[name] for name in environ if name not in _OF_TORCHRUN})
    if place is None or place.local_rank is None:
        return None
    # A batch script has the variables of a task, but is in no step; a step of one task is for us to fill.
    if place.source == SLURM and (place.world == 1 or not is_step(environ)):
        return None
    return place


def environment_of(place: Place) -> dict[str, str]:
    """What ranks need, in torchrun's words.

    Raises:
        LaunchError: nobody says where ranks on several hosts meet.
    """
    master = place.master or (HERE if place.world in (1, place.local_world) else None)
    if master is None:
        raise LaunchError(
            f"{place.source} says rank {place.rank} of {place.world}, on several hosts, and MASTER_ADDR is not set; "
            "set it to the host of rank 0"
        )
    values = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world,
        "MASTER_ADDR": master,
        "MASTER_PORT": place.port or LATE_PORT,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def run_as_found(program: Program, found: Place, env: Mapping[str, str]) -> NoReturn:
    """Become the program, as the rank that this process is."""
    _become(program.command(found.local_rank or 0), {**os.environ, **env, **environment_of(found)})


def encode(plan: Plan) -> str:
    """A plan as one word that no shell changes."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(plan.as_json()).encode(), 9)).decode()


def decode(text: str) -> Plan:
    """What `encode` encoded."""
    return Plan.from_json(json.loads(zlib.decompress(base64.urlsafe_b64decode(text))))


def main(encoded: str) -> NoReturn:
    """Become the rank of the plan that this process is."""
    plan = decode(encoded)
    found = place_of({name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN})
    if found is None:
        raise LaunchError("no variable of MPI or Slurm says which rank this is; start it by mpirun or srun")
    places = [place for node in range(len(plan.hosts)) for place in plan.places(node)]
    if found.world != len(places):
        raise LaunchError(
            f"{found.source} started {found.world} ranks, the plan has {len(places)}; give no other number"
        )
    place = places[found.rank]
    if found.local_rank not in (None, place.local_rank):
        raise LaunchError(
            f"{found.source} made rank {found.rank} the local rank {found.local_rank}, and by the order of hosts it is "
            f"{place.local_rank} on {place.host}; have hosts filled one after the other (--map-by slot, -m block)"
        )
    if plan.cwd is not None:
        os.chdir(plan.cwd)
    assert plan.master_addr is not None and plan.master_port is not None
    job = jobs_of(plan, place.node, (plan.master_addr, plan.master_port))[place.local_rank]
    if job.environment.get(own_cores.VARIABLE):
        os.sched_setaffinity(0, [int(core) for core in job.environment[own_cores.VARIABLE].split(",")])
    _become(job.command, job.environment)


def _become(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, dict(environment))
    except OSError as error:
        raise LaunchError(f"{command[0]}: {error.strerror}") from None


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except WindlassError as error:
        print(f"windlass: {error}", file=sys.stderr)
        sys.exit(1)
