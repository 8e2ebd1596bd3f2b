"""Request bodies: bounded reading, strict UTF-8, and JSON within limits."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from windlass.base.bounded_json import JsonError, parse_json
from windlass.base.text import one_line
from windlass.serving.api_errors import ApiError

_MAX_DEPTH = 64
_DISCARD_LIMIT = 256 * 2**20
_DISCARD_SECONDS = 10.0
_PIECE_SECONDS = 30.0
# Above this size, the parser and the checks of fields would delay the tokens of other requests.
_CHECK_IN_THREAD_BYTES = 2**18

Result = TypeVar("Result")


async def read_request(request: Request, max_bytes: int, check: Callable[[dict[str, Any]], Result]) -> Result:
    """Read the body of a request and return the result of `check` for its JSON object.

    Args:
        check: function that checks the fields; it runs in a thread for a large body.

    Raises:
        ApiError: the content type is not JSON; the body is too large, too slow, compressed, or not valid UTF-8 or JSON;
            or `check` raises.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # Browsers let a foreign web page send some other types without a CORS preflight.
        raise ApiError(
            415,
            f"Content-Type is {content_type[:80] or 'not given'!r}; send the body as application/json",
            code="unsupported_content_type",
            closes_connection=True,
        )
    body = await read_body(request, max_bytes)
    request.state.is_large = len(body) > _CHECK_IN_THREAD_BYTES
    return await check_fields(request, lambda: check(parse_object(body)))


async def check_fields(request: Request, check: Callable[[], Result]) -> Result:
    """Return the result of `check`, which runs in a thread if the body of the request was large."""
    return await asyncio.to_thread(check) if request.state.is_large else check()


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: the body is compressed, has more than `max_bytes` bytes, or pauses for more than 30 seconds.
        ClientDisconnect: the client disconnected.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415,
            f"Content-Encoding is {encoding[:80]!r}; send the body without compression",
            code="unsupported_content_encoding",
            closes_connection=True,
        )
    declared = request.headers.get("content-length", "")
    too_large = ApiError(
        413,
        f"the body has more than {max_bytes:,} bytes; send less, or start the server with a larger --max-body-bytes",
        code="body_too_large",
        closes_connection=True,
    )
    waits_for_permission = request.headers.get("expect", "").lower() == "100-continue"
    if declared.isdigit() and int(declared) > max_bytes and waits_for_permission:
        raise too_large
    body = bytearray()
    total = 0
    deadline = asyncio.get_running_loop().time() + _DISCARD_SECONDS
    while True:
        try:
            message = await asyncio.wait_for(request.receive(), _PIECE_SECONDS)
        except TimeoutError as error:
            raise ApiError(
                408,
                f"no more of the body arrived within {_PIECE_SECONDS:.0f} seconds; send it without pauses",
                closes_connection=True,
            ) from error
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        total += len(piece)
        if total <= max_bytes:
            body += piece
        else:
            body.clear()
            if total > _DISCARD_LIMIT or asyncio.get_running_loop().time() > deadline:
                raise too_large
        if not message.get("more_body", False):
            break
    if total > max_bytes:
        too_large.closes_connection = False
        raise too_large
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object in UTF-8.

    Raises:
        ApiError: the body is not a JSON object in UTF-8, has NaN, infinite numbers, lone surrogates or a key twice, or
            is nested too deeply.
    """
    try:
        text = body.removeprefix(codecs.BOM_UTF8).decode("utf-8")  # RFC 8259 lets parsers ignore a byte order mark
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8 at byte {error.start}") from error
    try:
        data = parse_json(text, _unique_keys, max_depth=_MAX_DEPTH, finite_numbers=True)
    except JsonError as error:
        raise _invalid(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise _invalid(f"the body is a JSON {_json_type(data)}; send an object")
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(data)
    return data


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonError(f"the key {one_line(repr(twice), 80)} is given twice")
    return found


def _check_surrogates(data: dict[str, Any]) -> None:
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise _invalid(f"the body has the lone surrogate \\u{code:04x}; a text must be valid Unicode") from error


def _json_type(data: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(data), "null")


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")
