"""Server-sent events, and requests that are cancelled when their client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from windlass.base.log import logger
from windlass.serving.api_errors import ApiError, api_error_of, encode_json
from windlass.serving.request_counter import RequestCounter

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # json.dumps makes an encoder in each call


def encode_event(data: Any, name: str | None = None, *, is_long: bool = False) -> bytes:
    """Return one event with JSON in ASCII.

    Characters above ASCII are escaped, because some clients split lines at U+2028 and at other separators too.

    Args:
        name: type of the event; None: it has none.
        is_long: see `encode_json`.
    """
    text = encode_json(_ENCODER, data, is_long)
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {text}\n\n".encode("ascii")


class EventStream(Response):
    """Streamed response. The events end as soon as the client disconnects.

    Args:
        first: first event. It is computed before the status is sent, so that an error until then has its own status.
        events: the other events.
        request_id: id in the log for unexpected errors.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], request_id: str) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._first = first
        self._events = events
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last one, or until the client disconnects."""
        try:
            await until_disconnect(Request(scope, receive), self._send_events(send))
        except ClientDisconnect:
            return
        except ApiError as error:  # the server is stopping and ended the answer early
            await self._send_error(send, error)

    async def _send_events(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                # The status is sent already, so the error becomes the last event.
                known = api_error_of(error, self._request_id)
                if known.status == 500:
                    logger.error("request %s failed", self._request_id, exc_info=error)
                await self._send_error(send, known)
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_error(self, send: Send, error: ApiError) -> None:
        await send({"type": "http.response.body", "body": encode_event(error.body()) + DONE, "more_body": False})


async def start_event_stream(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """Wait for the first event and return the response.

    Raises:
        ClientDisconnect: the client disconnected before the first event.
        Exception: the first event could not be produced.
    """
    try:
        first = await until_disconnect(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, request.state.request_id)


async def until_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """Run a coroutine, and cancel it when the client disconnects. The request's body must have been read.

    Raises:
        ClientDisconnect: the client disconnected.
        ApiError: the server is stopping and has ended the answer early.
    """
    counter: RequestCounter = request.state.counter
    running: asyncio.Future[Result] = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    counter.answers.add(running)
    try:
        waited: set[asyncio.Future[Any]] = {running, watching}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnect
        if running.cancelled() and counter.is_cut:
            raise ApiError(
                503,
                "the server is stopping and has cut the answer; send the request again",
                code="draining",
                retry_after=5,
            )
        return running.result()
    finally:
        counter.answers.discard(running)
        await _cancel(watching)
        await _cancel(running)


async def _cancel(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class _Ended:
    """End of one of the merged iterators, and the error that ended it."""

    error: Exception | None


async def merge(streams: list[AsyncIterator[Result]]) -> AsyncGenerator[tuple[int, Result], None]:
    """Yield the items of several iterators in order of arrival, each with the index of its iterator.

    An error of one iterator ends all. Closing the generator closes the iterators.
    """
    if len(streams) == 1:
        try:
            async for only in streams[0]:
                yield 0, only
        finally:
            await _close(streams[0])
        return
    # The queue is bounded, so that iterators do not run ahead of a slow client.
    queue: asyncio.Queue[tuple[int, Result | _Ended]] = asyncio.Queue(len(streams))

    async def forward(index: int, stream: AsyncIterator[Result]) -> None:
        ended = _Ended(None)
        try:
            async for item in stream:
                await queue.put((index, item))
        except Exception as error:
            ended = _Ended(error)
        finally:
            await _close(stream)
        await queue.put((index, ended))

    tasks = [asyncio.ensure_future(forward(index, stream)) for index, stream in enumerate(streams)]
    left = len(streams)
    try:
        while left:
            index, item = await queue.get()
            if isinstance(item, _Ended):
                if item.error is not None:
                    raise item.error
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            await _cancel(task)


async def _close(stream: AsyncIterator[Any]) -> None:
    close: Any = getattr(stream, "aclose", None)
    if close is not None:
        closing: Awaitable[None] = close()
        await closing
