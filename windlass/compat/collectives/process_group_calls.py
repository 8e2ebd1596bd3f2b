"""Start, membership and creation of process groups, with the functions of `deepspeed.comm`."""

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
from windlass.comm.group_creation import new_process_group
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
    """Initialize the process group unless it is initialized. Collective over all processes of the launcher.

    Rank and world size come from the environment of torchrun, DeepSpeed's launcher, Slurm, Open MPI, MPICH or Intel
    MPI; without any, this is a single-process run. Azure ML and SageMaker provide the address of rank 0. `RANK`,
    `WORLD_SIZE`, `LOCAL_RANK` and, without `init_method`, `MASTER_ADDR` and `MASTER_PORT` are set afterwards.

    Args:
        dist_backend: torch's backend name. None: gloo for CPU tensors and, if CUDA is available, nccl for CUDA tensors.
            Without CUDA, "nccl" is replaced by gloo, with a warning.
        auto_mpi_discovery: also look for launchers other than torchrun.
        distributed_port: port of rank 0, if the environment sets none.
        verbose: log the world size and the backends.
        timeout: time after which an incomplete collective fails; None: `DEEPSPEED_TIMEOUT` minutes, or 30.
        init_method: torch's rendezvous URL (`tcp://`, `file://`, `env://`).
        dist_init_required: False: raise unless the caller has initialized torch.distributed.
        config: configuration whose `comms_logger` section is applied.
        rank, world_size: values that override the environment; -1: taken from the environment.

    Raises:
        CommunicationError: `dist_init_required` is False and nothing is initialized, the environment is incomplete, or
            the rendezvous failed.
    """
    if config is not None:
        comms_logger.configure(config)
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise CommunicationError(
            "dist_init_required=False, but torch.distributed is not initialised; initialise it or remove the argument"
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
    rendezvous = {} if init_method is not None else {"MASTER_ADDR": HERE, "MASTER_PORT": distributed_port}
    for name, value in {**alone, **rendezvous}.items():
        os.environ.setdefault(name, str(value))
    if verbose:
        logger.info(
            "torch.distributed started: %s, %s", plural(dist.get_world_size(), "rank"), dist.get_backend_config()
        )


def _available_backend(backend: str | None) -> str | None:
    """Return the requested backend; gloo instead of nccl if there is no CUDA device, with a warning."""
    if backend == "nccl" and not torch.cuda.is_available():
        logger.warning("dist_backend='nccl', but there is no CUDA device: the ranks use gloo")
        return "gloo"
    return backend


def is_available() -> bool:
    """Return True if torch was built with its distributed package."""
    return bool(dist.is_available())


def is_initialized() -> bool:
    """Return True if a process group is initialized, by windlass or by other code."""
    return bool(dist.is_available() and dist.is_initialized())


def destroy_process_group(group: Any = None) -> None:
    """Destroy a group; without an argument, all groups."""
    require_initialized()
    dist.destroy_process_group(group)


def get_rank(group: Any = None) -> int:
    """Return this process's rank in `group`; -1 if it is not a member."""
    require_initialized()
    return dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks in `group`; -1 if this rank is not a member."""
    require_initialized()
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """Return this process's rank on its host."""
    require_initialized()
    return local_rank_of(os.environ) or 0


def get_world_group() -> Any:
    """Return the group of all ranks."""
    require_initialized()
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the global rank of rank `group_rank` of `group`."""
    require_initialized()
    return dist.get_global_rank(group_or_world(group), group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the global ranks of `group`, in group order."""
    require_initialized()
    return dist.get_process_group_ranks(group_or_world(group))


def new_group(ranks: Sequence[int] | None = None, timeout: timedelta | None = None, backend: str | None = None) -> Any:
    """Create a group of some ranks. Collective over all ranks, including those outside the group."""
    require_initialized()
    return new_process_group(ranks, timeout=timeout, backend=backend)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Create torch's `DeviceMesh` over all ranks. Collective."""
    from torch.distributed.device_mesh import init_device_mesh

    require_initialized()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def has_all_gather_into_tensor() -> bool:
    """Return True: `all_gather_into_tensor` works with every backend."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Return True: a backend without a native reduce-scatter uses one that windlass composes."""
    return True


def has_all_reduce_coalesced() -> bool:
    """Return True: several tensors are reduced with one work object."""
    return True


def has_coalescing_manager() -> bool:
    """Return True if torch has the context manager that coalesces several NCCL collectives into one launch."""
    return hasattr(dist.distributed_c10d, "_coalescing_manager")


def set_backend() -> None:
    """Do nothing: torch.distributed is the only backend."""
