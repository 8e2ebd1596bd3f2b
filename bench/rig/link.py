"""A slow link between ranks of one machine: the kernel paces what each connection sends."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

_SO_MAX_PACING_RATE = 47  # of Linux; Python has no name for it
_FREE = -1  # of 32 bits, as a signed number: no limit


def pace(rate: int) -> int:
    """Let no TCP connection of this process send more than `rate` bytes a second from now on; 0: as fast as it goes.
    How many there are. Each way of a connection counts by itself, as on a full-duplex link.

    Raises:
        OSError: the kernel can't do that (it is none of Linux).
    """
    paced = 0
    for entry in Path("/proc/self/fd").iterdir():
        number = int(entry.name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    found.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate or _FREE)
                    paced += 1
        except OSError as error:
            if error.errno != errno.EBADF:  # gone since: the folder is open itself while it is read
                raise
    return paced
