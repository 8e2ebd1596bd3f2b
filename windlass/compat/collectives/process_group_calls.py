"""The process group as a script sees it: how it is started, who is in it, which groups there are beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.comm import bootstrap
from windlass.comm.comms_logger import comms_logger
from windlass.comm.rank_environment import HERE, local_rank_of
from windlass.compat.collectives.backend_capabilities import group_or_world, require_initialized


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = bootstrap.DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start the process group unless there is one. Collective over all processes of the launcher.

    Who this process is comes from the environment of torchrun, DeepSpeed's launcher, Slurm, Open MPI, MPICH, Intel MPI,
    Azure ML or SageMaker; without any it is alone. `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`
    are set afterwards.

    Args:
        dist_backend: torch's name; None: gloo for CPU tensors and, where CUDA is there, nccl for its tensors.
        auto_mpi_discovery: also look for launchers other than torchrun.
        distributed_port: of rank 0, where the environment names none.
        verbose: say who was found.
        timeout: after which a collective that a peer never joined fails; None: `DEEPSPEED_TIMEOUT` minutes, or 30.
        init_method: a torch URL (`tcp://`, `file://`, `env://`) at which ranks meet.
        dist_init_required: False: the caller started it, and that is checked.
        config: a configuration, for its `comms_logger`.
        rank: with `world_size`, goes before the environment.

    Raises:
        CommunicationError: the environment is half there, or the ranks could not meet.
    """
    if config is not None:
        comms_logger.configure(config)
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise CommunicationError(
            "dist_init_required=False, but torch.distributed is not initialised; initialise it or leave that out"
        )
    bootstrap.init_distributed(
        _available_backend(dist_backend),
        timeout,
        port=distributed_port,
        discover=auto_mpi_discovery,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
    )
    alone = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": 0}
    meeting = {} if init_method is not None else {"MASTER_ADDR": HERE, "MASTER_PORT": distributed_port}
    for name, value in {**alone, **meeting}.items():
        os.environ.setdefault(name, str(value))
    if verbose:
        logger.info(
            "torch.distributed started: %s, %s", plural(dist.get_world_size(), "rank"), dist.get_backend_config()
        )


def _available_backend(backend: str | None) -> str | None:
    """The back end asked for; gloo in the place of nccl where there is no CUDA device, which is said."""
    if backend == "nccl" and not torch.cuda.is_available():
        logger.warning("dist_backend='nccl', but there is no CUDA device: the ranks talk over gloo")
        return "gloo"
    return backend


def is_available() -> bool:
    """Whether torch was built with its distributed package."""
    return bool(dist.is_available())


def is_initialized() -> bool:
    """Whether there is a process group, whoever started it."""
    return bool(dist.is_available() and dist.is_initialized())


def destroy_process_group(group: Any = None) -> None:
    """End a group; without one, all of them."""
    require_initialized()
    dist.destroy_process_group(group)


def get_rank(group: Any = None) -> int:
    """This process among those of `group`; -1 where it is not in it."""
    require_initialized()
    return dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """How many ranks `group` has; -1 where this one is not in it."""
    require_initialized()
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """This process among those of its host."""
    require_initialized()
    return local_rank_of(os.environ) or 0


def get_world_group() -> Any:
    """The group of all ranks."""
    require_initialized()
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The global rank of the `group_rank`-th of `group`."""
    require_initialized()
    return dist.get_global_rank(group_or_world(group), group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The global ranks of `group`, in its order."""
    require_initialized()
    return dist.get_process_group_ranks(group_or_world(group))


def new_group(ranks: Sequence[int] | None = None, timeout: timedelta | None = None, backend: str | None = None) -> Any:
    """A group of some ranks. Collective over all ranks, also those that are not in it."""
    require_initialized()
    return dist.new_group(None if ranks is None else list(ranks), timeout=timeout, backend=backend)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """torch's device mesh over all ranks, of these sizes and names. Collective."""
    from torch.distributed.device_mesh import init_device_mesh

    require_initialized()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def has_all_gather_into_tensor() -> bool:
    """True: every back end has it or it is composed."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """True: every back end has it or it is composed."""
    return True


def has_all_reduce_coalesced() -> bool:
    """True: several tensors at once are one work."""
    return True


def has_coalescing_manager() -> bool:
    """Whether torch has the context in which NCCL puts several collectives into one launch."""
    return hasattr(dist.distributed_c10d, "_coalescing_manager")


def set_backend() -> None:
    """Nothing: torch.distributed is the only one, and it is in use once it is started."""
