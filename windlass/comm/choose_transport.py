"""Choice of the transport of a group of ranks, with the reason."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from windlass.base.errors import ConfigError
from windlass.comm.mpi_library import BACKEND as MPI_BACKEND
from windlass.comm.rank_group import RankGroup
from windlass.comm.shared_memory import shared_memory_problem
from windlass.comm.shm_transport import ShmTransport
from windlass.comm.transport import Transport, WireOptions
from windlass.comm.wire_transport import GlooTransport, MpiTransport, NcclTransport

NAMES = ("auto", "shm", "gloo", "nccl", "mpi")


def choose_transport(
    requested: str, group: RankGroup, device: torch.device, *, ways: WireOptions, timeout: timedelta
) -> tuple[Transport, str]:
    """Return the transport for `group`, and the reason as text. Collective.

    Args:
        requested: auto, shm, gloo, nccl or mpi. The environment variable `WINDLASS_TRANSPORT` overrides it.
        device: Device of the tensors.
        ways: Options of a wire transport. With quantized messages, gloo or mpi replaces shm.
        timeout: Time-out of waits for a peer (shm).

    Raises:
        ConfigError: the name does not exist, or the transport does not support this device or these ranks.
    """
    name, why = choose_transport_name(requested, group, device)
    if name == "shm" and ways.quantizes:
        over_mpi = dist.get_backend(group.process_group) == MPI_BACKEND
        name, why = "mpi" if over_mpi else "gloo", "quantized messages are sent, and shared memory is read in place"
    if name == "nccl":
        return NcclTransport(group, ways), why
    if name == "mpi":
        return MpiTransport(group, ways), why
    return (ShmTransport(group, timeout) if name == "shm" else GlooTransport(group, ways)), why


def choose_transport_name(requested: str, group: RankGroup, device: torch.device) -> tuple[str, str]:
    """Return the name of the transport for `group`, and the reason as text. Collective.

    Arguments and errors are those of `choose_transport`.
    """
    source = "comm.transport"
    if os.environ.get("WINDLASS_TRANSPORT"):
        requested, source = os.environ["WINDLASS_TRANSPORT"].lower(), "WINDLASS_TRANSPORT"
    if requested not in NAMES:
        raise ConfigError(f"{source} = {requested!r} is not a transport; use one of {', '.join(NAMES)}")
    over_mpi = dist.get_backend(group.process_group) == MPI_BACKEND
    if requested == "mpi" and not over_mpi:
        raise ConfigError(
            f"{source} = 'mpi', but the ranks are not connected by MPI; set comm.backend to mpi, or call "
            "windlass.init_distributed('mpi') first"
        )
    if over_mpi and requested in ("gloo", "nccl"):
        raise ConfigError(
            f"{source} = {requested!r}, but the ranks are connected by MPI (init_distributed('mpi')); use mpi, or auto"
        )
    if device.type == "cuda":
        if requested not in ("auto", "nccl", "mpi"):
            raise ConfigError(
                f"{source} = {requested!r} moves CPU tensors, but the model is on {device}; use nccl or auto"
            )
        return ("mpi", "the ranks are connected by MPI") if over_mpi else ("nccl", "the model is on GPUs")
    if requested == "nccl":
        raise ConfigError(f"{source} = 'nccl' moves GPU tensors, but the model is on the CPU; use auto, shm or gloo")
    if requested in ("gloo", "mpi"):
        return requested, f"{source} requests it"
    wire = "mpi" if over_mpi else "gloo"
    if group.size == 1 and requested == "auto":
        return wire, "one rank has no peers"
    problem = shared_memory_problem(group)
    if problem is None:
        return "shm", f"{group.size} CPU ranks of one host"
    if requested == "shm":
        raise ConfigError(f"{source} = 'shm' is not available: {problem}; use {wire} or auto")
    return wire, f"no shared memory: {problem}"
