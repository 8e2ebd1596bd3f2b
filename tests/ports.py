"""Free ports for the rendezvous of ranks."""

from __future__ import annotations

import random
import socket

_LOWEST, _BEYOND = 20_000, 32_000


def free_port() -> int:
    """Return a free port below the range of the kernel's ephemeral ports.

    The kernel may assign an ephemeral port to a connection of another test at any moment.
    """
    while True:
        port = random.SystemRandom().randrange(_LOWEST, _BEYOND)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
