"""Which launcher started this process, and which place it gave it: read from the environment, nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass.base.errors import CommunicationError

Environment = Mapping[str, str]
HERE = "127.0.0.1"
# Ports below those that systems hand out by themselves (32768 on Linux).
_FIRST_PORT, _PORTS = 15000, 16384


@dataclass(frozen=True)
class Place:
    """This process among all that were started together.

    Args:
        source: the launcher, for messages.
        local_rank, local_world: among those of its host; None: not said.
        master: where rank 0 is; None: not said, and there are several hosts.
        port: None: not said.
        warning: what looks wrong about it.
    """

    source: str
    rank: int
    world: int
    local_rank: int | None = None
    local_world: int | None = None
    master: str | None = None
    port: int | None = None
    warning: str = ""


def place_of(environ: Environment, *, others: bool = True) -> Place | None:
    """The place that `environ` gives; None where no launcher left a word.

    `RANK` and `WORLD_SIZE` count before everything; then Open MPI, MVAPICH, MPICH and Intel MPI, Slurm. `MASTER_ADDR`
    and `MASTER_PORT` count whoever started the process.

    Args:
        others: False: only `RANK` and its like.

    Raises:
        CommunicationError: a variable is not the number that it should be, or half of them are missing.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        found: Place | None = _torchrun(environ)
    elif others:
        found = _other(environ)
    else:
        found = None
    if found is None:
        return None
    if not 0 <= found.rank < found.world:
        raise CommunicationError(
            f"{found.source} says that this is rank {found.rank} of {found.world}; ranks go from 0 to {found.world - 1}"
        )
    return _cloud(environ, replace(found, **_given(environ)))


def local_rank_of(environ: Environment) -> int | None:
    """This process among those of its host, by the first launcher that says it."""
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
             "PALS_LOCAL_RANKID", "SLURM_LOCALID")  # fmt: skip
    return next((_number(environ, name) for name in names if environ.get(name)), None)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,9],login` is `gpu03`."""
    first = re.split(r",(?![^\[]*\])", nodes.strip(), maxsplit=1)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def slurm_port(environ: Environment) -> int:
    """A port that all tasks of a job step reckon alike, and other steps differently."""
    job = _number(environ, "SLURM_JOB_ID", 0) or _number(environ, "SLURM_JOBID", 0) or 0
    step = _number(environ, "SLURM_STEP_ID", 0) or 0
    return _FIRST_PORT + (job + 1009 * step) % _PORTS


def _torchrun(environ: Environment) -> Place:
    """torchrun, windlass run, DeepSpeed's launcher, Kubernetes, or the user's own hand."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        raise CommunicationError(half([name for name in names if name not in environ]))
    rank, world = _need(environ, "RANK"), _need(environ, "WORLD_SIZE")
    local_world = _number(environ, "LOCAL_WORLD_SIZE") or _number(environ, "LOCAL_SIZE")
    other = _other(environ) if world == 1 else None
    warning = ""
    if other is not None and other.world > 1:
        warning = (
            f"WORLD_SIZE is 1, but {other.source} started {other.world} processes: each trains alone. If they are to "
            "train together, unset RANK and WORLD_SIZE"
        )
    return Place("the environment", rank, world, local_rank_of(environ), local_world, warning=warning)


def _other(environ: Environment) -> Place | None:
    """The place that a launcher other than torchrun gave."""
    return next((place for look in (_open_mpi, _mvapich, _hydra, _slurm) if (place := look(environ))), None)


def _open_mpi(environ: Environment) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    world, local_world = _need(environ, "OMPI_COMM_WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return Place(
        "Open MPI",
        _need(environ, "OMPI_COMM_WORLD_RANK"),
        world,
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world,
        HERE if local_world == world else None,
    )


def _mvapich(environ: Environment) -> Place | None:
    if "MV2_COMM_WORLD_RANK" not in environ:
        return None
    world, local_world = _need(environ, "MV2_COMM_WORLD_SIZE"), _number(environ, "MV2_COMM_WORLD_LOCAL_SIZE")
    local_rank = _number(environ, "MV2_COMM_WORLD_LOCAL_RANK")
    here = HERE if local_world == world else None
    return Place("MVAPICH", _need(environ, "MV2_COMM_WORLD_RANK"), world, local_rank, local_world, here)


def _hydra(environ: Environment) -> Place | None:
    """MPICH, Intel MPI, Cray's PALS; Slurm's own PMI, which says less than Slurm does."""
    if "PMI_RANK" not in environ or "PMI_SIZE" not in environ:
        return None
    rank, world = _need(environ, "PMI_RANK"), _need(environ, "PMI_SIZE")
    slurm = _slurm(environ)
    if slurm is not None and (slurm.rank, slurm.world) == (rank, world):
        return slurm
    local_rank = _number(environ, "MPI_LOCALRANKID")
    if local_rank is None:
        local_rank = _number(environ, "PALS_LOCAL_RANKID")
    local_world = _number(environ, "MPI_LOCALNRANKS") or _number(environ, "PALS_LOCAL_SIZE")
    return Place("MPI (PMI)", rank, world, local_rank, local_world, HERE if local_world == world else None)


def _slurm(environ: Environment) -> Place | None:
    if not environ.get("SLURM_PROCID"):
        return None
    world = (
        _number(environ, "SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_NTASKS") or _number(environ, "SLURM_NPROCS")
    )
    if world is None:
        return None
    nodes = next((environ[name] for name in _NODE_LISTS if environ.get(name)), "")
    count = _number(environ, "SLURM_STEP_NUM_NODES") or _number(environ, "SLURM_NNODES")
    alone = count == 1 or (count is None and not re.search(r"[,\[]", nodes))
    batch = world > 1 and not any(environ.get(name) for name in ("SLURM_STEP_ID", "SLURM_STEPID", *_STEP))
    warning = (
        f"SLURM_NTASKS is {world}, but no variable of a job step is set: if this process was not started by srun, the "
        "others will not come; start the script with srun, or with `windlass run`"
    )
    return Place(
        "Slurm",
        _need(environ, "SLURM_PROCID"),
        world,
        _number(environ, "SLURM_LOCALID"),
        world if alone else None,
        HERE if alone else first_host(nodes) or None,
        slurm_port(environ),
        warning if batch else "",
    )


_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_STEP = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")


def _cloud(environ: Environment, place: Place) -> Place:
    """What Azure ML and SageMaker say of where rank 0 is."""
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
    """What holds whoever started the process."""
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
    """What is said where an environment is half there."""
    return (
        f"the environment names some ranks but not all it takes: {', '.join(missing)} is missing; "
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
            f"the environment variable {name} = {text!r} is no whole number; mend or unset it"
        ) from None


def _need(environ: Environment, name: str) -> int:
    value = _number(environ, name)
    if value is None:
        raise CommunicationError(half([name]))
    return value
