"""Sockets of ranks that are all on one host, kept at its loopback interface.

By default gloo listens at the address of the host's name, and torch's store at every address, where others on the
network reach them. Neither authenticates who connects.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from windlass.comm.addresses import gloo_at_loopback

_BACKLOG = 2048  # ranks that may wait to be accepted


def bind_gloo_to_loopback() -> None:
    """Make gloo groups of this process listen at the loopback interface, unless the user named another."""
    os.environ.update(gloo_at_loopback(os.environ))


def loopback_store(address: str, port: int, rank: int, world: int, timeout: timedelta) -> TCPStore:
    """Make the store at which `world` ranks of this host meet; rank 0 serves it at a loopback address alone.

    It returns when all of them are connected.
    """
    if rank == 0:
        # A port in use is this process's own, whose store torch finds again, or torch says why it cannot listen.
        with contextlib.suppress(OSError), socket.create_server((address, port), backlog=_BACKLOG) as listening:
            number = listening.detach()  # the store closes it
            return TCPStore(
                address, port, world, is_master=True, timeout=timeout, multi_tenant=True, master_listen_fd=number
            )
    return TCPStore(address, port, world, is_master=rank == 0, timeout=timeout, multi_tenant=True)
