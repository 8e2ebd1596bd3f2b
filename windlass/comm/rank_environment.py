"""Rank environment: rank, world size and rendezvous of this process, read only from environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass.base.errors import CommunicationError
from windlass.comm import slurm
from windlass.comm.addresses import is_loopback

Environment = Mapping[str, str]
HERE = "127.0.0.1"
SLURM = "Slurm"


@dataclass(frozen=True)
class RankEnvironment:
    """Position of this process among all processes that were started together.

    Args:
        source: Name of the launcher; "the environment" if `RANK` and `WORLD_SIZE` are set.
        rank, world: Global rank, and number of ranks.
        local_rank, local_world: Rank and number of ranks on this host; None: unknown.
        master: Address of rank 0; None: unknown.
        port: Port of the rendezvous; None: unknown.
        warning: Warning about a suspicious environment, or empty.
    """

    source: str
    rank: int
    world: int
    local_rank: int | None = None
    local_world: int | None = None
    master: str | None = None
    port: int | None = None
    warning: str = ""

    @property
    def one_host(self) -> bool:
        """True if all ranks are known to be on this host."""
        return self.world == 1 or self.local_world == self.world or is_loopback(self.master)


def rank_environment(environ: Environment, *, others: bool = True) -> RankEnvironment | None:
    """Return the rank environment in `environ`; None if no launcher set one.

    The first source that is set is used: `RANK` and `WORLD_SIZE`, Open MPI, MVAPICH, MPICH and Intel MPI, Slurm.
    `MASTER_ADDR`, `MASTER_PORT` and `LOCAL_RANK` are used with any launcher.

    Args:
        others: If False, return None unless `RANK` or `WORLD_SIZE` is set.

    Raises:
        CommunicationError: a variable is missing or invalid, or the rank is negative or not below the number of ranks.
    """
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        found: RankEnvironment | None = _torchrun(environ)
    elif others:
        found = _other(environ)
    else:
        found = None
    if found is None:
        return None
    if not 0 <= found.rank < found.world:
        raise CommunicationError(
            f"{found.source} sets rank {found.rank} of {found.world} ranks; correct the rank, or the number of ranks, "
            "which must be larger than every rank"
        )
    return _cloud(environ, replace(found, **_given(environ)))


def local_rank_of(environ: Environment) -> int | None:
    """Return this process's rank on its host, from the first of `LOCAL_RANK`, MPI and Slurm that sets it, or None."""
    return _first(environ, ("LOCAL_RANK", *(name for family in _MPI for name in family.local_rank), "SLURM_LOCALID"))


def _torchrun(environ: Environment) -> RankEnvironment:
    """Return the rank environment that `RANK` and `WORLD_SIZE` describe.

    These are set by torchrun, windlass run, DeepSpeed's launcher and Kubernetes, or by hand.

    Raises:
        CommunicationError: one of the two is missing.
    """
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        raise CommunicationError(half([name for name in names if not environ.get(name)]))
    rank, world = _need(environ, "RANK"), _need(environ, "WORLD_SIZE")
    local_world = _number(environ, "LOCAL_WORLD_SIZE") or _number(environ, "LOCAL_SIZE")
    other = _other(environ) if world == 1 else None
    warning = ""
    if other is not None and other.world > 1:
        warning = (
            f"WORLD_SIZE is 1, but {other.source} started {other.world} processes: each trains alone. If they are to "
            "train together, unset RANK and WORLD_SIZE"
        )
    return RankEnvironment("the environment", rank, world, local_rank_of(environ), local_world, warning=warning)


def _other(environ: Environment) -> RankEnvironment | None:
    """Return the rank environment that MPI or Slurm has set, or None."""
    step = _slurm(environ)
    for family in _MPI:
        place = _of_mpi(family, environ)
        # If PMI and Slurm give the same rank, prefer Slurm's variables, which have more information than Slurm's PMI.
        # Under mpirun the ranks differ, because the tasks of the Slurm step are MPI's proxies.
        if place is not None and family.of_slurm_too and step is not None:
            return step if (step.rank, step.world) == (place.rank, place.world) else place
        if place is not None:
            return place
    return step


@dataclass(frozen=True)
class _MpiFamily:
    """Environment variables of one kind of MPI. Among several names for one value, the first that is set is used.

    Args:
        of_slurm_too: True if Slurm sets some of these names too; a rank without a world size is then ignored.
    """

    source: str
    rank: tuple[str, ...]
    world: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world: tuple[str, ...]
    of_slurm_too: bool = False


def _world_of(source: str, prefix: str) -> _MpiFamily:
    rank, world, local_rank, local_world = (
        (f"{prefix}_COMM_WORLD_{name}",) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    return _MpiFamily(source, rank, world, local_rank, local_world)


_MPI = (
    _world_of("Open MPI", "OMPI"),
    _world_of("MVAPICH", "MV2"),
    _MpiFamily(  # MPICH, Intel MPI, Cray PALS
        "MPI (PMI)",
        ("PMI_RANK", "PMIX_RANK"),
        ("PMI_SIZE", "PMIX_SIZE", "PALS_SIZE"),
        ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"),
        of_slurm_too=True,
    ),
)


def _of_mpi(family: _MpiFamily, environ: Environment) -> RankEnvironment | None:
    rank, world = _first(environ, family.rank), _first(environ, family.world)
    if rank is None or (world is None and family.of_slurm_too):
        return None
    if world is None:
        raise CommunicationError(half([family.world[0]]))
    local_world = _first(environ, family.local_world)
    # mpirun fills the hosts of a job in their order, so rank 0 is on the first host.
    master = HERE if local_world == world else next(iter(slurm.allocated_hosts(environ)), None)
    return RankEnvironment(family.source, rank, world, _first(environ, family.local_rank), local_world, master)


def _slurm(environ: Environment) -> RankEnvironment | None:
    if not environ.get("SLURM_PROCID"):
        return None
    world = (
        _number(environ, "SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_NTASKS") or _number(environ, "SLURM_NPROCS")
    )
    if world is None:
        return None
    count = _number(environ, "SLURM_STEP_NUM_NODES") or _number(environ, "SLURM_NNODES")
    hosts = [] if count == 1 else slurm.hosts_of_step(environ)
    alone = count == 1 or (count is None and len(hosts) < 2)
    job = _number(environ, "SLURM_JOB_ID", 0) or _number(environ, "SLURM_JOBID", 0) or 0
    warning = (
        f"SLURM_NTASKS is {world}, but no variable of a job step is set: if this process was not started by srun, the "
        "other ranks will not start; start the script with srun, or with `windlass run`"
    )
    return RankEnvironment(
        SLURM,
        _need(environ, "SLURM_PROCID"),
        world,
        _number(environ, "SLURM_LOCALID"),
        world if alone else slurm.tasks_here(environ),
        HERE if alone else next(iter(hosts), None),
        slurm.port_of(job, _number(environ, "SLURM_STEP_ID", 0) or 0),
        warning if world > 1 and not slurm.is_step(environ) else "",
    )


def _cloud(environ: Environment, place: RankEnvironment) -> RankEnvironment:
    """Return `place` with the missing address of rank 0 from Azure ML or SageMaker, and the missing port from Azure ML.

    The source is then the cloud service. A `place` with an address other than `HERE` is returned unchanged.
    """
    if place.master is not None and place.master != HERE:
        return place
    if "AZUREML_EXPERIMENT_ID" in environ and "DLTS_JOB_ID" not in environ:
        node, _, port = environ.get("AZ_BATCH_MASTER_NODE", "").partition(":")
        if place.master is None and node:
            return replace(place, source="Azure ML", master=node, port=place.port or 6105)
        return replace(place, source="Azure ML", port=place.port or (54965 if place.master else None))
    if place.master is None and environ.get("SM_HOSTS"):
        hosts = re.findall(r"[\w.-]+", environ["SM_HOSTS"])
        return replace(place, source="SageMaker", master=hosts[0] if hosts else None)
    return place


def _given(environ: Environment) -> dict[str, Any]:
    """Return the fields whose variables are the same for all launchers: `master`, `port` and `local_rank`."""
    given: dict[str, Any] = {}
    if environ.get("MASTER_ADDR"):
        given["master"] = environ["MASTER_ADDR"]
    port = _number(environ, "MASTER_PORT")
    if port is not None:
        given["port"] = port
    if environ.get("LOCAL_RANK"):
        given["local_rank"] = _number(environ, "LOCAL_RANK")
    return given


def half(missing: list[str]) -> str:
    """Return the message about an incomplete environment."""
    return (
        f"the environment of the ranks is incomplete: {', '.join(missing)} is missing; "
        "start the script with `windlass run --nproc N script.py` or torchrun"
    )


def _number(environ: Environment, name: str, default: int | None = None) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise CommunicationError(
            f"the environment variable {name} = {text!r} is not a whole number; correct or unset it"
        ) from None


def _first(environ: Environment, names: tuple[str, ...]) -> int | None:
    return next((_number(environ, name) for name in names if environ.get(name)), None)


def _need(environ: Environment, name: str) -> int:
    value = _number(environ, name)
    if value is None:
        raise CommunicationError(half([name]))
    return value
