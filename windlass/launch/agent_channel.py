"""Messages between the launcher and a node: one JSON object a line, after a mark that no other output begins with."""

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
"""A node that has heard nothing for so long ends its ranks: whoever started them is gone."""


class AgentChannel:
    """The writing end. Any thread may send; a signal's handler too."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock, self.closed = descriptor, threading.RLock(), False

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; nothing where nobody reads any more, which `closed` then says."""
        self.send_bytes(MESSAGE_PREFIX + json.dumps(message).encode() + b"\n")

    def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are."""
        with self._lock:
            if self.closed:
                return
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # a broken pipe
                self.closed = True

    def close(self) -> None:
        """Tell the other side that nothing more will come."""
        with self._lock:
            self.closed = True
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:  # once: its number may be another file's by now
            with contextlib.suppress(OSError):
                os.close(descriptor)


class MessageReader:
    """The reading end: bytes in, messages and other lines out."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[dict[str, Any] | bytes]:
        """What `data` completes: messages, and lines that are none as they are."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [parsed for line in lines if (parsed := _parse_line(line)) is not None]

    def take_rest(self) -> bytes:
        """What never became a line."""
        rest, self._buffer = self._buffer, b""
        return rest


def bytes_to_text(data: bytes) -> str:
    """Any bytes as a text that JSON carries; `bytes_of` is the way back."""
    return data.decode("utf-8", "surrogateescape")


def text_to_bytes(text: str) -> bytes:
    """The bytes that `text_of` was given."""
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
        raise LaunchError(f"the other end of the connection sent {one_line(repr(found), 60)} for a message")
    return found
