"""HTTP connections that may not stay open without a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 30.0
"""Seconds that a client has for the head of a request; it is closed after twice as many at the latest."""


class TimedHttpProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, which also closes connections that never finish the head of a request.

    uvicorn itself closes idle connections, but a byte now and then keeps a connection open, and a client could take
    all file descriptors of the process with such connections.
    """

    _last_cycle: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start to watch the connection."""
        super().connection_made(transport)
        self.loop.call_later(HEAD_SECONDS, self._close_without_request)

    def _close_without_request(self) -> None:
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is self._last_cycle and (cycle is None or cycle.response_complete):
            self.transport.close()
            return
        self._last_cycle = cycle
        self.loop.call_later(HEAD_SECONDS, self._close_without_request)
