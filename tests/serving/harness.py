"""Servers for tests: in this process on a thread, or in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from tests.ports import free_port
from tests.serving.fake_engine import FakeEngine
from windlass.serving.engine_loading import EngineSource
from windlass.serving.http_app import build_http_app
from windlass.serving.http_server import HttpServer, bind_socket
from windlass.serving.server_context import ServerContext
from windlass.serving.server_settings import ServerSettings

FACTORY = "tests.serving.fake_engine:make_fake_engine"
WAIT_SECONDS = 240.0


def settings_with(**values: Any) -> ServerSettings:
    """Return settings of a model named `m`."""
    return ServerSettings(**{"model_names": ("m",), **values})


def client_of(engine: FakeEngine | None, **settings: Any) -> TestClient:
    """Return a client of an application in this process. Without an engine, the application is still starting."""
    context = ServerContext(settings_with(**settings), engine)
    return TestClient(build_http_app(context), raise_server_exceptions=False)


class _ReadyBackend:
    """Backend that is ready at once and never fails."""

    async def start(self) -> None: ...

    async def wait_for_failure(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None: ...

    def kill(self) -> None: ...


@contextlib.contextmanager
def server_on_thread(engine: FakeEngine, **settings: Any) -> Iterator[str]:
    """Serve an engine over HTTP on a free loopback port; yield the address."""
    listener = bind_socket("127.0.0.1", 0)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stopping: list[Callable[[], None]] = []
    started = threading.Event()

    async def run() -> None:
        context = ServerContext(settings_with(**settings), engine)
        app = build_http_app(context)
        server = HttpServer(app, _ReadyBackend(), context.requests, listener, 5.0)
        loop = asyncio.get_running_loop()
        stopping.append(lambda: loop.call_soon_threadsafe(server.request_stop))
        started.set()
        await server.run(handle_signals=False)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    started.wait()
    try:
        yield address
    finally:
        stopping[0]()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


class ServerProcess:
    """Server of fake engines in a process of its own, with a router if there are several replicas or `has_router`.

    Args:
        model: kind of engine; see `make_fake_engine`.
        has_router: if True, a single engine too runs as a replica in another process, behind a router.
        options: options of the engine, and settings of the server.
    """

    def __init__(
        self, tmp_path: Path, *, model: str = "fake", replicas: int = 1, has_router: bool = False, **options: Any
    ) -> None:
        self.port = free_port()
        self._responses: list[HTTPResponse] = []
        self.log_path = tmp_path / "server.log"
        script = (
            "import sys; from tests.serving.harness import run_server_process; "
            "sys.exit(run_server_process(sys.argv[1]))"
        )
        task = {
            "model": model,
            "replicas": replicas if has_router or replicas > 1 else None,
            "options": options,
            "port": self.port,
        }
        root = Path(__file__).parents[2]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script, json.dumps(task)],
                stdout=log,
                stderr=log,
                cwd=root,
                env={**os.environ, "PYTHONPATH": str(root)},
            )

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Send one request; return status and body."""
        response = self.open(method, path, body)
        text = response.read().decode()
        response.close()
        return response.status, text

    def open(self, method: str, path: str, body: Any = None) -> HTTPResponse:
        """Send one request; return the response before its body is read."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        data = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", "Connection": "close"})
            response = connection.getresponse()
        finally:
            connection.close()  # the response keeps the socket
        self._responses.append(response)
        return response

    def wait_until_ready(self) -> None:
        """Wait until the server accepts requests."""
        wait_until(lambda: self.process.poll() is not None or self._is_ready())
        assert self.process.poll() is None, self.log()

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self.request("GET", "/ready")[0] == 200
        return False

    def log(self) -> str:
        """Return the output so far."""
        return self.log_path.read_text()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for response in self._responses:
            response.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def run_server_process(text: str) -> int:
    """Run the server in the process of `ServerProcess`, and return the exit code."""
    from windlass.base.errors import WindlassError
    from windlass.serving.engine_server import serve_engine
    from windlass.serving.replicas.replica_server import serve_replicas

    task = json.loads(text)
    own = ("drain_timeout", "max_body_bytes")
    settings = settings_with(**{name: task["options"].pop(name) for name in own if name in task["options"]})
    source = EngineSource(task["model"], task["options"], FACTORY)
    try:
        listener = bind_socket("127.0.0.1", task["port"])
        if task["replicas"] is not None:
            return serve_replicas(source, settings, task["replicas"], listener, lambda: None)
        return serve_engine(source, settings, listener, lambda: None)
    except WindlassError as error:
        print(f"windlass: {error}", file=sys.stderr)
        return error.exit_code


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail after four minutes."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def events_of(text: str) -> list[Any]:
    """Return the events of a stream, without the last one, which must be [DONE]."""
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts[-1] == "[DONE]", parts
    return [json.loads(part) for part in parts[:-1]]
