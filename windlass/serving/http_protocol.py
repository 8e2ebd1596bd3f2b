"""HTTP connections with bounds on the head of a request: its time and its bytes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from windlass.serving.api_errors import ApiError

HEAD_SECONDS = 30.0
"""Seconds that a client has for the head of a request; it is closed after twice as many at the latest."""

MAX_HEAD_BYTES = 2**17
"""Bytes of a head. uvicorn bounds them with one of its two parsers alone."""

_TOO_LARGE = ApiError(431, f"the head of the request has more than {MAX_HEAD_BYTES:,} bytes; send fewer headers")


class TimedHttpProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, which also closes connections that never finish the head of a request, or send a huge one.

    uvicorn itself closes idle connections, but a byte now and then keeps a connection open, and a client could take
    all file descriptors of the process with such connections.
    """

    _last_cycle: Any = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start to watch the connection."""
        super().connection_made(transport)
        self.loop.call_later(HEAD_SECONDS, self._close_without_request)

    def data_received(self, data: bytes) -> None:
        """Parse a piece of a request."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before or not self._is_idle():
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            body = json.dumps(_TOO_LARGE.body()).encode()
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            self.transport.close()

    def _is_idle(self) -> bool:
        """Return True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _close_without_request(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is self._last_cycle and self._is_idle():
            self.transport.close()
            return
        self._last_cycle = self.cycle
        self.loop.call_later(HEAD_SECONDS, self._close_without_request)
