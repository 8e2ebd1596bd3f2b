"""Process that serves one application: socket, signals, drain, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Generator
from typing import Any, Literal, Protocol

import uvicorn
from starlette.types import ASGIApp

from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.serving.http_protocol import TimedHttpProtocol
from windlass.serving.request_counter import RequestCounter, ServerPhase

EXIT_ENGINE_FAILED = 3
"""Exit code after the engine failed while it served."""

_BACKLOG = 2048
# After the drain: time for cancelled requests to send their last event, and for connections to close.
_LAST_EVENTS_SECONDS = 2.0


class ServedBackend(Protocol):
    """Engine or replicas behind an application."""

    async def start(self) -> None:
        """Start, and return once requests can be answered."""

    async def wait_for_failure(self) -> None:
        """Return when no further request can be answered."""

    async def stop(self) -> None:
        """Free all resources."""

    def kill(self) -> None:
        """End the processes that the backend started, at once."""


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Call this before the model is loaded, so that a port in use is reported at once.

    Raises:
        ConfigError: the port is in use or not allowed, or the host is not an address of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host {host!r} cannot be resolved: {error}; give an address or a host name of this machine"
        ) from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use; stop the process that listens there, or choose another --port"
            ) from error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from error
    return bound


class _SignalFreeServer(uvicorn.Server):
    """uvicorn's server, with signals left to `HttpServer`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no signal handlers."""
        yield


class HttpServer:
    """Server of one application, from its start to its exit code.

    The first SIGTERM or SIGINT drains: readiness ends, new requests get 503, and running ones finish, for
    `drain_timeout` seconds at most. A second signal, or one before the model is loaded, ends the process at once.
    """

    def __init__(
        self,
        app: ASGIApp,
        backend: ServedBackend,
        counter: RequestCounter,
        listener: socket.socket,
        drain_timeout: float,
    ) -> None:
        self._backend = backend
        self._counter = counter
        self._drain_timeout = drain_timeout
        self._listener = listener
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        config = uvicorn.Config(
            app,
            http=TimedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = _SignalFreeServer(config)
        self._stop_requested = asyncio.Event()

    def request_stop(self) -> None:
        """Drain and end, as after a signal."""
        self._stop_requested.set()

    async def run(self, *, handle_signals: bool = True) -> int:
        """Serve until a signal or a failure. Return the exit code of the process.

        Args:
            handle_signals: True: stop at SIGTERM and SIGINT. Possible only in the main thread of a process
                that only serves.

        Raises:
            Exception: the backend could not be started.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT) if handle_signals else ():
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        stopping = asyncio.ensure_future(self._stop_requested.wait())
        starting = asyncio.ensure_future(self._backend.start())
        try:
            await asyncio.wait({serving, stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            if not starting.done():
                return 0
            starting.result()
            return await self._serve_until_stopped(stopping)
        finally:
            for task in (starting, stopping):
                task.cancel()
            self._server.should_exit = True
            await asyncio.wait({serving})
            await self._backend.stop()

    async def _serve_until_stopped(self, stopping: asyncio.Task[Literal[True]]) -> int:
        self._counter.phase = ServerPhase.READY
        failing = asyncio.ensure_future(self._backend.wait_for_failure())
        waited: set[asyncio.Future[Any]] = {stopping, failing}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()
            self._counter.phase = ServerPhase.FAILED
            await self._counter.wait_until_idle(_LAST_EVENTS_SECONDS)
            return EXIT_ENGINE_FAILED
        failing.cancel()
        await self._drain()
        return 0

    async def _drain(self) -> None:
        self._counter.phase = ServerPhase.DRAINING
        if self._counter.running:
            logger.info(
                "stopping: %s in progress, %.0f s at most; a second signal stops at once",
                plural(self._counter.running, "request"),
                self._drain_timeout,
            )
        if not await self._counter.wait_until_idle(self._drain_timeout):
            logger.warning("%s did not end in time; the answers are cut", plural(self._counter.running, "request"))
            self._counter.cut_answers()
            await self._counter.wait_until_idle(_LAST_EVENTS_SECONDS)

    def _on_signal(self, number: int) -> None:
        if self._stop_requested.is_set() or self._counter.phase is ServerPhase.STARTING:
            # A model that is being loaded on another thread cannot be interrupted in any other way.
            self._backend.kill()
            sys.stderr.flush()
            os._exit(128 + number)
        self._stop_requested.set()
