"""State that all endpoints of a server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import TypeVar

from windlass.serving.api_errors import ApiError
from windlass.serving.served_engine import ServedEngine
from windlass.serving.server_metrics import ServerMetrics
from windlass.serving.server_settings import ServerSettings

Result = TypeVar("Result")


class ServerPhase(Enum):
    """Phase in the life of a server."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class RequestCounter:
    """Phase of a server and number of requests in progress."""

    def __init__(self) -> None:
        self.phase = ServerPhase.STARTING
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

    async def wait_until_idle(self, timeout: float) -> bool:
        """Wait until no request is in progress. Return False after `timeout` seconds."""
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


class ServerContext:
    """Engine, settings, metrics and phase of a server. `engine` is there once the model is loaded.

    Attributes:
        engine_requests: ids of the requests in the engine.
    """

    def __init__(self, settings: ServerSettings, engine: ServedEngine | None = None) -> None:
        self.settings = settings
        self.metrics = ServerMetrics(settings.model_names[0], settings.engine_index)
        self.requests = RequestCounter()
        self.created = int(time.time())
        self.engine_requests: set[str] = set()
        self._engine: ServedEngine | None = None
        # One thread, because tokenizers are not safe to use from several; it keeps long prompts off the event loop.
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        if engine is not None:
            self.attach(engine)

    @property
    def engine(self) -> ServedEngine:
        """Engine of the server.

        Raises:
            ApiError: the model is not loaded yet.
        """
        if self._engine is None:
            self.requests.refuse_unless_ready()
            raise ApiError(503, "the engine is not there yet; try again", code="loading", retry_after=5)
        return self._engine

    @property
    def loaded_engine(self) -> ServedEngine | None:
        """Engine, or None while the model is being loaded."""
        return self._engine

    def attach(self, engine: ServedEngine) -> None:
        """Serve a started engine from now on."""
        self._engine = engine
        self.metrics.watch(engine)
        self.requests.phase = ServerPhase.READY

    async def in_tokenizer_thread(self, function: Callable[[], Result]) -> Result:
        """Run a function on the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, function)

    def lora_of(self, model: str | None) -> str | None:
        """Return the adapter that a request's `model` names; None for the base model.

        Raises:
            ApiError: no such model.
        """
        if model is None or model in self.settings.model_names:
            return None
        if model in self.engine.lora_names:
            return model
        names = ", ".join([*self.settings.model_names, *self.engine.lora_names][:20])
        raise ApiError(
            404,
            f"the model {model[:200]!r} does not exist; this server has {names}",
            parameter="model",
            code="model_not_found",
        )

    def close(self) -> None:
        """End the tokenizer's thread."""
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)
