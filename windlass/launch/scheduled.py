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
from dataclasses import dataclass
from typing import NoReturn

from windlass.base.errors import WindlassError
from windlass.launch import cores as own_cores
from windlass.launch.errors import LaunchError
from windlass.launch.jobs import jobs_of
from windlass.launch.plan import Plan
from windlass.launch.program import Program
from windlass.launch.request import LATE_PORT
from windlass.launch.slurm import expand_counts, expand_hosts


@dataclass(frozen=True)
class _Family:
    """How one kind of launcher names a rank's place."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


_FAMILIES = (
    _Family("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),
    _Family(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Family(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Family(
        "MPICH",
        ("PMI_RANK", "PMIX_RANK"),
        ("PMI_SIZE", "PMIX_SIZE", "PALS_SIZE"),
        ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"),
    ),
)


@dataclass(frozen=True)
class Found:
    """A place that another launcher gave this process."""

    by: str
    rank: int
    size: int
    local_rank: int
    local_size: int


def place_given(environ: Mapping[str, str]) -> Found | None:
    """This process's place, if another launcher started several: torchrun, MPI, or a step of Slurm."""
    for family in _FAMILIES:
        values = [_first(environ, names) for names in (family.rank, family.size, family.local_rank)]
        if None not in values:
            rank, size, local_rank = (int(value) for value in values if value is not None)
            local_size = int(_first(environ, family.local_size) or size)
            return Found(family.name, rank, size, local_rank, local_size)
    # A batch script has SLURM_PROCID too, but no step; a step of one task is for us to fill.
    if "SLURM_STEP_ID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        size, node = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ.get("SLURM_NODEID") or 0)
        counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE") or str(size))
        local_size = counts[node] if node < len(counts) else size
        return Found("Slurm", int(environ["SLURM_PROCID"]), size, int(environ["SLURM_LOCALID"]), local_size)
    return None


def environment_of(found: Found, environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks need and do not have yet.

    Raises:
        LaunchError: nobody says where ranks on several hosts meet.
    """
    values = {
        "RANK": str(found.rank),
        "WORLD_SIZE": str(found.size),
        "LOCAL_RANK": str(found.local_rank),
        "LOCAL_WORLD_SIZE": str(found.local_size),
        "MASTER_ADDR": _address(found, environ),
        "MASTER_PORT": str(_port(environ)),
    }
    return {name: value for name, value in values.items() if not environ.get(name)}


def run_as_found(program: Program, found: Found, env: Mapping[str, str]) -> NoReturn:
    """Become the program, as the rank that this process is."""
    _become(program.command(found.local_rank), {**os.environ, **env, **environment_of(found, os.environ)})


def encode(plan: Plan) -> str:
    """A plan as one word that no shell changes."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(plan.as_json()).encode(), 9)).decode()


def decode(text: str) -> Plan:
    """What `encode` encoded."""
    return Plan.from_json(json.loads(zlib.decompress(base64.urlsafe_b64decode(text))))


def main(encoded: str) -> NoReturn:
    """Become the rank of the plan that this process is."""
    plan, found = decode(encoded), place_given({**os.environ, "RANK": ""})
    if found is None:
        raise LaunchError("no variable of MPI or Slurm says which rank this is; start it by mpirun or srun")
    places = [place for node in range(len(plan.hosts)) for place in plan.places(node)]
    if found.size != len(places):
        raise LaunchError(f"{found.by} started {found.size} ranks, the plan has {len(places)}; give no other number")
    place = places[found.rank]
    if place.local_rank != found.local_rank:
        raise LaunchError(
            f"{found.by} made rank {found.rank} the local rank {found.local_rank}, and by the order of hosts it is "
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


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _address(found: Found, environ: Mapping[str, str]) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if found.local_size == found.size:
        return "127.0.0.1"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes:
        return expand_hosts(nodes)[0]
    raise LaunchError(
        f"{found.by} started ranks on several hosts, and MASTER_ADDR is not set; set it to the host of rank 0"
    )


def _port(environ: Mapping[str, str]) -> int:
    """One that all ranks of a job take: jobs of Slurm that share a host have different ones."""
    if environ.get("MASTER_PORT"):
        return int(environ["MASTER_PORT"])
    job = environ.get("SLURM_JOB_ID", "")
    return 15000 + int(job) % 16000 if job.isdecimal() else LATE_PORT


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except WindlassError as error:
        print(f"windlass: {error}", file=sys.stderr)
        sys.exit(1)
