"""Heartbeats of a server, which distinguish a server that waits from one that was stopped or cannot be reached.

A server may answer a pull only when other workers have pushed, and an update waits for replicas and the disk. So a
worker limits the time without any message, but not the time until an answer. Each link of a server has a thread that
only sends heartbeats.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from windlass.comm.pair_link import LinkClosedError, PairLink
from windlass.parameter_server.messages import MessageKind

_BEATS = 4
"""Number of heartbeats sent in the time after which a silent server counts as lost."""


def send_heartbeats(link: PairLink, seconds: float) -> None:
    """Send heartbeats on a thread until the link is closed.

    Args:
        seconds: time without a message after which the other side treats this process as lost.
    """

    def beat() -> None:
        try:
            while not link.wait_closed(seconds / _BEATS):
                link.send_heartbeat([MessageKind.ALIVE])  # blocks while the other side does not receive
        except LinkClosedError:
            return  # the thread that serves the link reports this error at its next send or receive

    threading.Thread(target=beat, name="windlass-heartbeat", daemon=True).start()


def receive_message(link: PairLink, on_heartbeat: Callable[[], None] = lambda: None) -> list[int]:
    """Receive the header of a server's next message, as integers, and skip heartbeats.

    Args:
        on_heartbeat: called after each heartbeat.

    Raises:
        LinkClosedError: the server has ended.
        LinkSilentError: the server sent nothing for `link.idle`.
    """
    while True:
        numbers = link.receive_header()
        if numbers[0] != MessageKind.ALIVE:
            return numbers
        on_heartbeat()
