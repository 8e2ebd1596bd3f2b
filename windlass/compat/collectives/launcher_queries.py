"""Queries about the launcher, which need no process group, and two functions on groups, which need one."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError
from windlass.base.log import logger
from windlass.comm import bootstrap
from windlass.comm.rank_environment import local_rank_of, rank_environment
from windlass.compat.collectives.backend_capabilities import require_initialized

TORCH_DISTRIBUTED_DEFAULT_PORT = bootstrap.DEFAULT_PORT
NCCL_BACKEND, GLOO_BACKEND, MPI_BACKEND = "nccl", "gloo", "mpi"
CCL_BACKEND, HCCL_BACKEND, SCCL_BACKEND = "ccl", "hccl", "sccl"


def get_local_rank_from_launcher() -> int:
    """Return this process's rank on its host; 0 if the environment does not set it."""
    return local_rank_of(os.environ) or 0


def get_world_rank_from_launcher() -> int:
    """Return this process's global rank; 0 if the environment does not set it."""
    place = rank_environment(os.environ)
    return place.rank if place is not None else 0


def get_world_size_from_launcher() -> int:
    """Return the number of processes; 1 if the environment does not set it."""
    place = rank_environment(os.environ)
    return place.world if place is not None else 1


def in_aml() -> bool:
    """Return True in an Azure Machine Learning job."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Return True in a SageMaker job."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Return True in a DLTS job."""
    return "DLTS_JOB_ID" in os.environ


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Set `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` for any known launcher.

    If the launcher of several processes gives no local rank, `init_distributed` sets `LOCAL_RANK`.

    Raises:
        CommunicationError: the environment is incomplete or invalid, or it lacks the address of rank 0 and there is no
            mpi4py.
    """
    bootstrap.discover(distributed_port)
    if verbose:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        logger.info("found in the environment: %s", ", ".join(f"{name}={os.environ.get(name)}" for name in names))


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Call `mpi_discovery`, which also reads Azure ML's variables."""
    mpi_discovery(master_port, verbose)


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Call `mpi_discovery`, which also reads SageMaker's variables."""
    mpi_discovery(verbose=verbose)


def is_parallel(group: Any) -> bool:
    """Return True if `group` has more than one rank, False for None.

    Here None stands for a parallel axis that is not used. In the collectives, it stands for all ranks.
    """
    return group is not None and dist.get_world_size(group) > 1


def enable_symm_mem_for_group(group_name: str) -> None:
    """Enable torch's symmetric memory, which the GPUs of a group share.

    Raises:
        CommunicationError: there is no process group or no CUDA device.
    """
    require_initialized()
    if not torch.cuda.is_available():
        raise CommunicationError(
            f"symmetric memory for {group_name!r} needs a CUDA device, but there is none; delete the call"
        )
    from torch.distributed import _symmetric_memory

    _symmetric_memory.enable_symm_mem_for_group(group_name)  # type: ignore[arg-type]
