"""Sockets of ranks on one host, restricted to the loopback interface.

By default gloo listens at the address of the host name, and torch's store at every address, so that other machines of
the network can connect. Neither authenticates its connections.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from windlass.comm.addresses import gloo_at_loopback

_BACKLOG = 2048  # maximum number of connections that wait to be accepted


def bind_gloo_to_loopback() -> None:
    """Make gloo groups of this process listen at the loopback interface, unless the user set another interface."""
    os.environ.update(gloo_at_loopback(os.environ))


def loopback_store(address: str, port: int, rank: int, world: int, timeout: timedelta) -> TCPStore:
    """Create the rendezvous store of `world` ranks on this host. Rank 0 serves it, at a loopback address only.

    The call returns when all ranks are connected.
    """
    if rank == 0:
        # If the port is in use, `TCPStore` below reuses the store of this process on that port, or raises.
        with contextlib.suppress(OSError), socket.create_server((address, port), backlog=_BACKLOG) as listening:
            number = listening.detach()  # the store closes the socket
            return TCPStore(
                address, port, world, is_master=True, timeout=timeout, multi_tenant=True, master_listen_fd=number
            )
    return TCPStore(address, port, world, is_master=rank == 0, timeout=timeout, multi_tenant=True)
