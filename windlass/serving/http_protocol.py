"""HTTP connections that bound the time and the bytes of a request's head, and ignore the header `Upgrade`."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from windlass.serving.api_errors import ApiError
from windlass.serving.request_id import request_id_of

HEAD_SECONDS = 30.0
"""Seconds that a client has for the head of a request, from the start of the connection or the end of the last answer.
A slower connection is closed after at most twice this time."""

_ANSWERING = object()  # value of `_idle_since` while a request is being answered

MAX_HEAD_BYTES = 2**17
"""Maximum bytes of the head of a request. uvicorn bounds them only with its parser h11."""

_TOO_LARGE = ApiError(431, f"the head of the request has more than {MAX_HEAD_BYTES:,} bytes; send fewer headers")
_NOT_HTTP = ApiError(400, "the request is not valid HTTP/1.1; check what sends it", code="invalid_http")


class _UpgradeIgnoringParser:
    """httptools' parser for a server that never changes to another protocol.

    httptools ends a request with the header `Upgrade` after its head, and takes the body for data of the other
    protocol. A server may ignore the header (RFC 9110, 7.8), so the head is parsed again without the header. Java's
    HttpClient sends `Upgrade` in the first request of each connection.
    """

    def __init__(self, protocol: TimedHttpProtocol) -> None:
        self._protocol = protocol
        self._parser = self._new_parser()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        """Parse the next bytes that the connection received."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._protocol.asks_for_upgrade():  # CONNECT, which has no body
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser = self._new_parser()

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self._protocol)
        if hasattr(parser, "set_dangerous_leniencies"):  # as in uvicorn: allow data after a request
            parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _head_without_upgrade(self) -> bytes:
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self._protocol.url, version)]
        for name, value in self._protocol.headers:
            if name == b"connection":
                kept = [one for one in value.split(b",") if one.strip().lower() in (b"close", b"keep-alive")]
                value = b",".join(kept)
            if name not in (b"upgrade", b"http2-settings") and (value or name != b"connection"):
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join(lines) + b"\r\n\r\n"


class TimedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which also closes connections that never finish the head of a request, or send a huge one.
    Its errors have the form of the server's other errors.

    uvicorn itself closes idle connections, but a byte now and then keeps a connection open, and a client could take
    all file descriptors of the process with such connections.
    """

    # State at the last check: the latest request if the connection was idle (None if there was no request yet), else
    # `_ANSWERING`.
    _idle_since: Any = None
    _head_bytes = 0
    _in_body = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser: Any = _UpgradeIgnoringParser(self)

    def asks_for_upgrade(self) -> bool:
        """Return True if the head of the current request has the header `Upgrade`, for another protocol."""
        return bool(self.parser.should_upgrade()) and any(name == b"upgrade" for name, _ in self.headers)

    def on_headers_complete(self) -> None:
        """Start to answer a request, unless its head will be parsed again without `Upgrade`."""
        if not self.asks_for_upgrade():
            self._in_body = True
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Record the end of a request's body, unless its head will be parsed again without `Upgrade`."""
        if not self.asks_for_upgrade():
            super().on_message_complete()
            self._in_body = False
            self.headers = []  # an error from here on must not be answered with this request's id

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to watch the connection."""
        super().connection_made(transport)
        self.loop.call_later(HEAD_SECONDS, self._close_without_request)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, which may be a part of a request."""
        cycle, in_body = self.cycle, self._in_body
        super().data_received(data)
        if in_body or self._in_body or self.cycle is not cycle:  # the data was not just a part of one head
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not valid HTTP, and close the connection."""
        self._refuse(_NOT_HTTP)

    def _refuse(self, error: ApiError) -> None:
        """Answer a request that does not reach the application, and close the connection.

        In the middle of the answer to an earlier request, the connection is only closed.
        """
        if self.pipeline or (not self._is_idle() and self.cycle.response_started):
            self.transport.close()
            return
        sent = next((value for name, value in self.headers or () if name == b"x-request-id"), b"")
        response = error.response()
        response.headers["x-request-id"] = request_id_of(sent.decode("latin-1"))
        response.headers["connection"] = "close"
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
        lines += [b"%b: %b" % header for header in (*self.server_state.default_headers, *response.raw_headers)]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body))
        self.transport.close()

    def _is_idle(self) -> bool:
        """Return True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _close_without_request(self) -> None:
        if self.transport.is_closing():
            return
        idle_since = self.cycle if self._is_idle() else _ANSWERING
        if idle_since is not _ANSWERING and idle_since is self._idle_since:  # idle since the previous check
            self.transport.close()
            return
        self._idle_since = idle_since
        self.loop.call_later(HEAD_SECONDS, self._close_without_request)
