"""Heartbeats of a server, which distinguish a server that waits from one that was stopped or cannot be reached.

A server answers a pull when other workers have pushed, and an update waits for replicas and the disk. So a worker does
not limit the time of an answer. It limits the time without any message: each link of a server has a thread that sends
heartbeats and waits for nothing else.
"""

from __future__ import annotations

import threading

from windlass.comm.pair_link import LinkClosedError, PairLink
from windlass.parameter_server.messages import MessageKind

_BEATS = 4
"""Heartbeats in the time after which a server is lost without one."""


def send_heartbeats(link: PairLink, seconds: float) -> None:
    """Send heartbeats on a thread until the link is closed.

    Args:
        seconds: time without a message after which the other side takes this process for lost.
    """

    def beat() -> None:
        try:
            while not link.wait_closed(seconds / _BEATS):
                link.send([MessageKind.ALIVE])  # waits while the other side computes
        except LinkClosedError:
            return  # the thread that serves the link reports its end

    threading.Thread(target=beat, name="windlass-heartbeat", daemon=True).start()


def receive_message(link: PairLink) -> list[int]:
    """Receive the integers of the next message of a server, apart from heartbeats.

    Raises:
        LinkClosedError: the server has ended; `LinkSilentError`: it sent nothing for `link.idle`.
    """
    while True:
        numbers = link.receive_header()
        if numbers[0] != MessageKind.ALIVE:
            return numbers
