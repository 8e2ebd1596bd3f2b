"""Ports for ranks to meet at."""

from __future__ import annotations

import random
import socket

_LOWEST, _BEYOND = 20_000, 32_000


def free_port() -> int:
    """Return a free port below the range that the kernel gives to connections: one of these may be gone a moment
    later, where other tests connect."""
    while True:
        port = random.SystemRandom().randrange(_LOWEST, _BEYOND)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
