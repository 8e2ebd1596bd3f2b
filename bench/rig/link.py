"""Slow links between ranks of one machine: the kernel paces the bytes that each connection sends."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

_SO_MAX_PACING_RATE = 47  # Linux's number; Python has no name for it
_FREE = -1  # of 32 bits, as a signed number: no limit


def pace(rate: int) -> int:
    """Limit each TCP connection of this process to `rate` bytes per second; 0: unlimited. Return the number of
    connections. Each direction of a connection counts by itself, as on a full-duplex link.

    Raises:
        OSError: the kernel does not support it (not Linux).
    """
    paced = 0
    for entry in Path("/proc/self/fd").iterdir():
        number = int(entry.name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as result:
                if result.family in (socket.AF_INET, socket.AF_INET6) and result.type == socket.SOCK_STREAM:
                    result.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate or _FREE)
                    paced += 1
        except OSError as error:
            if error.errno != errno.EBADF:  # closed meanwhile: the descriptor of the folder itself is listed too
                raise
    return paced
