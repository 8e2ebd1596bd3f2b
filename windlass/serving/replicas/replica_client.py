"""HTTP client for replicas on Unix sockets: one request for each connection, bodies piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

_MAX_HEAD_BYTES = 2**16


class ReplicaConnectionError(Exception):
    """Error for a replica that cannot be reached, or whose connection ended before its answer."""


@dataclass
class ReplicaResponse:
    """Status and headers of a replica's answer, and access to the body, which is not read yet."""

    status: int
    headers: dict[str, str]
    _reader: asyncio.StreamReader
    _has_body: bool = True

    @property
    def is_stream(self) -> bool:
        """True if the body is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body piece by piece.

        Raises:
            ReplicaConnectionError: the connection ended before the end of the body.
        """
        if not self._has_body:
            return  # the answer to HEAD has no body; its content-length is that of GET
        try:
            if self.headers.get("transfer-encoding", "").lower() != "chunked":
                left = int(self.headers.get("content-length", "0"))
                while left:
                    piece = await self._reader.read(min(left, 2**16))
                    if not piece:
                        raise ReplicaConnectionError("the connection ended in the middle of the body")
                    left -= len(piece)
                    yield piece
                return
            while size := int(await self._reader.readline() or b"x", 16):
                piece = await self._reader.readexactly(size + 2)
                yield piece[:-2]
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise ReplicaConnectionError(str(error)) from error

    async def read(self) -> bytes:
        """Return the full body."""
        return b"".join([piece async for piece in self.pieces()])


@contextlib.asynccontextmanager
async def request_replica(
    socket_path: str, method: str, target: str, headers: Mapping[str, str], body: bytes
) -> AsyncGenerator[ReplicaResponse, None]:
    """Send a request and yield the response. The connection is closed at the end of the context.

    Args:
        target: path and query.
        headers: headers with names in lower case. `connection` and `content-length` are added, and `host` if missing.

    Raises:
        ReplicaConnectionError: there is no connection, or no answer.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path, limit=_MAX_HEAD_BYTES)
    except OSError as error:
        raise ReplicaConnectionError(str(error)) from error
    try:
        own = {"host": "replica", **headers, "connection": "close", "content-length": str(len(body))}
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in own.items())]
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise ReplicaConnectionError(str(error)) from error
        first, *rest = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in rest if line)
        received = {name.strip().lower(): value.strip() for name, _, value in pairs}
        yield ReplicaResponse(int(first.split(" ")[1]), received, reader, method != "HEAD")
    finally:
        writer.close()
        # the replica may have closed its end already
        with contextlib.suppress(OSError):
            await writer.wait_closed()
