"""Slow links between ranks of one machine: the kernel paces the bytes that each connection sends."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path

_SO_MAX_PACING_RATE = 47  # Linux's number; Python has no name for it
_FREE = -1  # no limit: the largest unsigned 32-bit number, as a signed number
_BYTES_RECEIVED = 128  # offset in the kernel's struct tcp_info
_INFO_SIZE = 256
_FEW_BYTES = 64 << 10

Ends = tuple[tuple[str, int], tuple[str, int]]
"""Address and port of a connection's own end, and of its other end."""


def pace(rate: int, among: Collection[Ends] | None = None) -> int:
    """Limit each TCP connection of this process to `rate` bytes per second; 0: unlimited. Return the number of
    connections. Each direction of a connection counts by itself, as on a full-duplex link.

    Args:
        among: the connections to limit; None: all.

    Raises:
        OSError: the kernel does not support it (not Linux).
    """
    paced = 0
    for connection, ends in _connections():
        if among is None or ends in among:
            connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate or _FREE)
            paced += 1
    return paced


def connection_ends() -> set[Ends]:
    """Return the ends of all TCP connections of this process."""
    return {ends for _, ends in _connections() if ends is not None}


def received_bytes(among: Collection[Ends]) -> int:
    """Return the bytes that these connections have received since they were made, without headers."""
    return sum(count for ends, count in received_by_connection().items() if ends in among)


def received_by_connection() -> dict[Ends, int]:
    """Return the bytes that each TCP connection of this process has received since it was made, without headers."""
    infos = {
        ends: connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)
        for connection, ends in _connections()
        if ends is not None
    }
    return {ends: struct.unpack_from("Q", info, _BYTES_RECEIVED)[0] for ends, info in infos.items()}


def require_one_link(received: Collection[int]) -> None:
    """Check that one connection carried all bytes but 1 % (or 64 KiB). Each connection is paced by itself, so a second
    one that carries more would add its rate to that of the link.

    Args:
        received: bytes of each connection.

    Raises:
        RuntimeError: other connections carried more.
    """
    beside = sum(received) - max(received, default=0)
    if beside > max(_FEW_BYTES, 0.01 * sum(received)):
        raise RuntimeError(
            f"{beside} of {sum(received)} bytes came over other connections than the busiest one, and each is paced to "
            "the rate of the whole link: the measured step is too short. Measure this method on two hosts"
        )


def _connections() -> Iterator[tuple[socket.socket, Ends | None]]:
    """Yield the TCP sockets of this process, and their ends if they are connected."""
    for entry in Path("/proc/self/fd").iterdir():
        number = int(entry.name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            found = socket.socket(fileno=os.dup(number))
        except OSError as error:
            if error.errno != errno.EBADF:  # EBADF: closed meanwhile, as the descriptor that listed the folder
                raise
            continue
        with closing(found):
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                yield found, _ends(found)


def _ends(connection: socket.socket) -> Ends | None:
    try:
        (here, port), (there, other) = connection.getsockname()[:2], connection.getpeername()[:2]
    except OSError:  # a listening socket has no peer
        return None
    return (here, port), (there, other)
