"""Server of one engine in this process."""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from windlass.base.errors import CommunicationError, WindlassError
from windlass.base.garbage_collection import freeze_live_objects
from windlass.base.log import logger
from windlass.serving.engine_loading import EngineSource
from windlass.serving.engine_ranks import EngineRankError, EngineRanks, needs_ranks
from windlass.serving.http_app import build_http_app
from windlass.serving.http_server import HttpServer
from windlass.serving.served_engine import ServedEngine
from windlass.serving.server_context import ServerContext
from windlass.serving.server_settings import ServerSettings

_HEALTH_SECONDS = 0.2
_GRACE_SECONDS = 2.0
# With Python's default of 5 ms, the engine's thread waits that long whenever the event loop has the interpreter lock.
_SWITCH_SECONDS = 0.0005


class EngineBackend:
    """Engine in this process, which is the first rank of its model; the other ranks run in other processes.

    Args:
        on_ready: called once the model is loaded.
    """

    def __init__(
        self, source: EngineSource, context: ServerContext, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        self._source = source
        self._context = context
        self._on_ready = on_ready
        self._ranks: EngineRanks | None = None

    @property
    def lost_rank(self) -> str | None:
        """Description of another rank of the model that has ended; None while all of them run."""
        return None if self._ranks is None else self._ranks.failure

    async def start(self) -> None:
        """Load the model and start the engine.

        Raises:
            EngineRankError: another rank of the model ended.
        """
        if needs_ranks(self._source, os.environ):
            self._ranks = EngineRanks(self._source)
            self._ranks.start()
            try:
                self._context.attach(await self._load_beside(self._ranks))
            except BaseException:
                self._ranks.kill()  # the other ranks may wait for this one, and would delay the error
                raise
        else:
            self._context.attach(await self._source.load())
        self._on_ready()

    async def _load_beside(self, ranks: EngineRanks) -> ServedEngine:
        """Load the model unless another rank ends first."""
        loading = asyncio.ensure_future(self._source.load())
        ended = asyncio.ensure_future(ranks.wait_for_end())
        waited: set[asyncio.Future[Any]] = {loading, ended}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and not loading.done() and ranks.exit_code > 0:
            await asyncio.wait({loading}, timeout=_GRACE_SECONDS)  # loading may fail with the other rank's error
        ended.cancel()
        error = loading.exception() if loading.done() else None
        # A CommunicationError may be only the effect of another rank's end: report that end instead. A PeerError is
        # raised as it is, because it contains the other rank's message.
        is_lost = isinstance(error, CommunicationError)
        if loading.done() and (error is None or isinstance(error, WindlassError)) and not is_lost:
            return loading.result()
        if error is not None and not await self._has_ended(ranks):
            raise error
        failure = EngineRankError(
            f"{ranks.failure} while the model was loaded; see its output for the reason", ranks.exit_code
        )
        if not loading.done():
            # the loading thread waits for the lost rank until a collective times out, and torch waits for the thread
            atexit.register(partial(_leave_at_once, failure.exit_code))
        loading.cancel()
        raise failure from error

    async def _has_ended(self, ranks: EngineRanks) -> bool:
        """Return True if another rank ends within a few seconds, which then explains an error of this rank."""
        try:
            await asyncio.wait_for(ranks.wait_for_end(), _GRACE_SECONDS)
        except TimeoutError:
            return False
        return True

    async def wait_for_failure(self) -> None:
        """Return when the engine has failed or another rank has ended."""
        engine = self._context.engine
        while engine.is_healthy and self.lost_rank is None:
            await asyncio.sleep(_HEALTH_SECONDS)
        if self._ranks is not None and await self._has_ended(self._ranks):
            logger.error("%s; the model cannot be served without it", self._ranks.failure)
            await self._wait_for_engine()
        if engine.error is not None:
            logger.error("the engine failed", exc_info=engine.error)

    async def _wait_for_engine(self) -> None:
        """Wait a few seconds for the running step to fail, so that its error can be logged."""
        deadline = asyncio.get_running_loop().time() + _GRACE_SECONDS
        while self._context.engine.is_healthy and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_HEALTH_SECONDS)

    async def stop(self) -> None:
        """Stop the engine."""
        engine = self._context.loaded_engine
        if engine is not None:
            await engine.shutdown(drain=False)
        if self._ranks is not None:
            await self._ranks.stop()
        self._context.close()

    def kill(self) -> None:
        """End the other ranks at once."""
        if self._ranks is not None:
            self._ranks.kill()


def _leave_at_once(code: int) -> None:
    """End the process without the rest of its cleanup."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve_engine(
    source: EngineSource, settings: ServerSettings, listener: socket.socket, on_ready: Callable[[], None]
) -> int:
    """Serve an engine on a bound socket until a signal or a failure. Return the exit code of the process.

    Args:
        on_ready: called once the model is loaded.

    Raises:
        WindlassError: the model cannot be loaded.
    """

    def get_ready() -> None:
        freeze_live_objects()
        sys.setswitchinterval(_SWITCH_SECONDS)
        on_ready()

    async def run() -> int:
        context = ServerContext(settings)
        backend = EngineBackend(source, context, get_ready)
        app = build_http_app(context)
        return await HttpServer(app, backend, context.requests, listener, settings.drain_timeout).run()

    return asyncio.run(run())
