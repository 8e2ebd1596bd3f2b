"""Registration of the backend `mpi` with `torch.distributed`, and a rendezvous whose address MPI broadcasts."""

from __future__ import annotations

import os
import socket
import uuid
import zlib
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from windlass.base.errors import CommunicationError
from windlass.comm.mpi_library import (
    BACKEND,
    MPI_LOCK,
    abort_on_exception,
    check_world,
    load_mpi,
)
from windlass.comm.mpi_process_group import MpiProcessGroup
from windlass.comm.rank_environment import HERE, RankEnvironment
from windlass.observe.environment.backend_support import is_cuda_aware, mpi_library_name

_BACKLOG = 2048


def register_mpi() -> str:
    """Register the backend with `torch.distributed`, and return its name there.

    From then on, an uncaught exception of this process aborts the MPI job.

    Raises:
        CommunicationError: mpi4py or MPI is missing or unsuitable (see `comm/mpi_library`).
    """
    mpi = load_mpi()
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"])
    abort_on_exception(mpi)
    return BACKEND


def mpi_rank_environment(place: RankEnvironment | None) -> RankEnvironment | None:
    """Return `place`, this process's ranks as set by the launcher. Collective.

    MPI checks the rank and the number of ranks, and adds the local ones if they are missing.

    Without a launcher (`place` is None), return MPI's rank environment, or None if MPI has one rank.

    Raises:
        CommunicationError: MPI is missing or unsuitable, or has another rank or number of ranks than the launcher.
    """
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    if place is None and world.Get_size() == 1:
        return None
    if place is None:  # the launcher sets no variables; only MPI has the rank
        place = RankEnvironment(f"MPI ({mpi_library_name(mpi)})", world.Get_rank(), world.Get_size())
    check_world(mpi, place.source, place.rank, place.world)
    if place.local_rank is None or place.local_world is None:
        with MPI_LOCK:
            host = world.Split_type(mpi.COMM_TYPE_SHARED)
            place = replace(place, local_rank=host.Get_rank(), local_world=host.Get_size())
            host.Free()
    return place


def store_over_mpi(place: RankEnvironment, own_address: str, timeout: timedelta) -> tuple[TCPStore, str, int]:
    """Create the rendezvous store at a free port of rank 0. Rank 0 broadcasts address and port by MPI. Collective.

    Args:
        own_address: Address of rank 0's host, used if ranks are on several hosts.

    Returns:
        The store, and its address and port.
    """
    mpi = load_mpi()
    one_host = place.local_world == place.world
    server: Any = None
    found: tuple[str, int] | None = None
    if place.rank == 0:
        with socket.create_server((HERE if one_host else "", 0), backlog=_BACKLOG) as listening:
            address, port = HERE if one_host else own_address, int(listening.getsockname()[1])
            number = listening.detach()  # the store closes the socket
        server = TCPStore(
            address,
            port,
            place.world,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=number,
        )
        found = (address, port)
    with MPI_LOCK:
        address, port = mpi.COMM_WORLD.bcast(found, root=0)
    if server is None:
        server = TCPStore(address, port, place.world, is_master=False, timeout=timeout, wait_for_workers=False)
    return server, address, port


def _create_group(options: Any, _: Any) -> MpiProcessGroup:
    """Create a process group for torch. Collective over its ranks."""
    mpi = load_mpi()
    ranks = list(options.global_ranks_in_group)
    world, index, size = mpi.COMM_WORLD, options.group_rank, options.group_size
    with MPI_LOCK:
        if not ranks:  # torch passes no ranks for the group of all ranks
            if not dist.is_initialized():
                check_world(mpi, "torch.distributed", index, size)
                _check_job(mpi, options.store, index)
            communicator = world.Dup()
        elif len(ranks) == 1:
            communicator = mpi.COMM_SELF.Dup()
        else:
            # The tag separates groups that ranks create at the same time.
            tag = zlib.crc32(str(options.group_id).encode()) % 32768
            communicator = world.Create_group(world.Get_group().Incl(ranks), tag)
    return MpiProcessGroup(mpi, communicator, is_cuda_aware(mpi), options.timeout, str(options.group_id))


def _check_job(mpi: Any, store: Any, rank: int) -> None:
    """Raise CommunicationError if ranks that share the rendezvous store are of different MPI jobs. Collective."""
    job = mpi.COMM_WORLD.bcast(uuid.uuid4().hex if mpi.COMM_WORLD.Get_rank() == 0 else None, root=0)
    first = store.compare_set("windlass mpi job", "", job).decode()
    if first != job:
        raise CommunicationError(
            f"rank {rank} (process {os.getpid()} on {socket.gethostname()}) belongs to another MPI job than the rank "
            f"that connected first to {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: two jobs use "
            "one rendezvous; give each a MASTER_PORT of its own, or leave MASTER_ADDR and MASTER_PORT unset"
        )
