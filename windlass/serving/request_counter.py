"""Phase of a server, and the requests in progress."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any

from windlass.serving.api_errors import ApiError


class ServerPhase(Enum):
    """Phase in the life of a server."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class RequestCounter:
    """Phase of a server and its requests in progress.

    Attributes:
        answers: tasks that compute answers.
        is_cut: True if the answers in progress were cancelled, because the server ends.
    """

    def __init__(self) -> None:
        self.phase = ServerPhase.STARTING
        self.answers: set[asyncio.Future[Any]] = set()
        self.is_cut = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Number of requests in progress."""
        return self._running

    def enter(self) -> None:
        """Count a request as in progress."""
        self._running += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count a request as ended."""
        self._running -= 1
        if not self._running:
            self._idle.set()

    def cut_answers(self) -> None:
        """Cancel all answers in progress. Their clients receive an error."""
        self.is_cut = True
        for answer in list(self.answers):
            answer.cancel()

    async def wait_until_idle(self, timeout: float) -> bool:
        """Wait until no request is in progress. Return False after `timeout` seconds."""
        if self._idle.is_set():  # with a timeout of 0, `wait_for` would raise without a check
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def refuse_unless_ready(self) -> None:
        """Raise unless new requests are accepted.

        Raises:
            ApiError: 503 with the phase.
        """
        if self.phase is ServerPhase.STARTING:
            raise ApiError(503, "the model is still being loaded; try again", code="loading", retry_after=5)
        if self.phase is ServerPhase.DRAINING:
            raise ApiError(
                503,
                "the server is stopping and accepts no new request; send it to another server",
                code="draining",
                retry_after=5,
                closes_connection=True,
            )
        if self.phase is ServerPhase.FAILED:
            raise ApiError(
                503, "the engine has failed; the server's log has the cause", code="engine_failed", retry_after=10
            )
