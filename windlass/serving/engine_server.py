"""Server of one engine in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from windlass.base.log import logger
from windlass.serving.engine_loading import EngineSource
from windlass.serving.http_app import build_http_app
from windlass.serving.http_server import HttpServer
from windlass.serving.server_context import ServerContext
from windlass.serving.server_settings import ServerSettings

_HEALTH_SECONDS = 0.2


class EngineBackend:
    """Engine in this process."""

    def __init__(self, source: EngineSource, context: ServerContext, on_ready: Callable[[], None]) -> None:
        self._source = source
        self._context = context
        self._on_ready = on_ready

    async def start(self) -> None:
        """Load the model and start the engine."""
        self._context.attach(await self._source.load())
        self._on_ready()

    async def wait_for_failure(self) -> None:
        """Return when the engine has failed."""
        engine = self._context.engine
        while engine.is_healthy:
            await asyncio.sleep(_HEALTH_SECONDS)
        logger.error("the engine failed", exc_info=engine.error)

    async def stop(self) -> None:
        """Stop the engine."""
        engine = self._context.loaded_engine
        if engine is not None:
            await engine.shutdown(drain=False)
        self._context.close()

    def kill(self) -> None:
        """Do nothing: there are no other processes."""


def serve_engine(
    source: EngineSource, settings: ServerSettings, listener: socket.socket, on_ready: Callable[[], None]
) -> int:
    """Serve an engine on a bound socket until a signal. Return the exit code of the process.

    Args:
        on_ready: called once the model is loaded.

    Raises:
        WindlassError: the model cannot be loaded.
    """

    async def run() -> int:
        context = ServerContext(settings)
        backend = EngineBackend(source, context, on_ready)
        app = build_http_app(context)
        return await HttpServer(app, backend, context.requests, listener, settings.drain_timeout).run()

    return asyncio.run(run())
