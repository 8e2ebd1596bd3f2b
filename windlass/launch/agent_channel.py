"""Messages between the launcher and a node agent: one JSON object a line, after a prefix that no other output has."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import Any

from windlass.base.bounded_json import JsonError, parse_json
from windlass.base.text import one_line
from windlass.launch.launch_errors import LaunchError

MESSAGE_PREFIX = b"\x1ewindlass "
KEEPALIVE = b"\n"
KEEPALIVE_INTERVAL_S = 1.0
KEEPALIVE_TIMEOUT_S = 6.0
"""Seconds without a keepalive after which a node agent ends its ranks, because its launcher is gone."""


class AgentChannel:
    """Writing end of a channel. Any thread may send, and so may a signal handler."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock, self.closed = descriptor, threading.RLock(), False

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. If the reader is gone, drop the message and set `closed`."""
        self.send_bytes(MESSAGE_PREFIX + json.dumps(message).encode() + b"\n")

    def send_bytes(self, data: bytes) -> None:
        """Send raw bytes."""
        with self._lock:
            if self.closed:
                return
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # broken pipe
                self.closed = True

    def close(self) -> None:
        """Close the channel, so that the reader reaches the end of the stream."""
        with self._lock:
            self.closed = True
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:  # only once: later the descriptor may belong to another file
            with contextlib.suppress(OSError):
                os.close(descriptor)


class MessageReader:
    """Reading end of a channel: converts bytes to messages and other lines."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[dict[str, Any] | bytes]:
        """Return the items that `data` completes: messages as dicts, and other lines as bytes. Empty lines are dropped.

        Raises:
            LaunchError: a message is damaged.
        """
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [parsed for line in lines if (parsed := _parse_line(line)) is not None]

    def take_rest(self) -> bytes:
        """Return and clear the incomplete last line."""
        rest, self._buffer = self._buffer, b""
        return rest


def bytes_to_text(data: bytes) -> str:
    """Convert any bytes to text that JSON can hold; `text_to_bytes` is the inverse."""
    return data.decode("utf-8", "surrogateescape")


def text_to_bytes(text: str) -> bytes:
    """Convert text from `bytes_to_text` back to bytes."""
    return text.encode("utf-8", "surrogateescape")


def _parse_line(line: bytes) -> dict[str, Any] | bytes | None:
    if not line:
        return None
    if not line.startswith(MESSAGE_PREFIX):
        return line + b"\n"
    try:
        found = parse_json(line[len(MESSAGE_PREFIX) :])
    except JsonError as error:
        raise LaunchError(f"the other end of the connection sent a damaged message: {error}") from None
    if not isinstance(found, dict):
        raise LaunchError(f"the other end of the connection sent {one_line(repr(found), 60)} instead of a message")
    return found
