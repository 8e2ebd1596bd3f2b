"""Router in front of replicas: an ASGI application that passes requests on, and its backend."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from windlass.base.bounded_json import JsonError, parse_json
from windlass.base.errors import ConfigError
from windlass.serving.api_errors import ApiError, json_response
from windlass.serving.engine_loading import EngineSource
from windlass.serving.event_stream import EventStream, until_disconnect
from windlass.serving.http_app import cors_middleware, error_handlers
from windlass.serving.replicas.merged_metrics import merge_expositions
from windlass.serving.replicas.prefix_index import BLOCK_CHARACTERS, block_hashes, choose_replica, routing_text
from windlass.serving.replicas.replica_client import ReplicaConnectionError, ReplicaResponse, request_replica
from windlass.serving.replicas.replica_process import ReplicaTask
from windlass.serving.replicas.replica_supervisor import ReplicaSupervisor
from windlass.serving.request_body import read_body
from windlass.serving.request_counter import RequestCounter, ServerPhase
from windlass.serving.request_gate import RequestGate
from windlass.serving.server_metrics import CONTENT_TYPE, HttpMetrics
from windlass.serving.server_settings import ServerSettings
from windlass.serving.status_endpoints import show_page, show_version

_FORWARDED_HEADERS = ("host", "content-type", "accept", "origin")
_RETURNED_HEADERS = ("content-type", "retry-after", "cache-control", "x-accel-buffering", "allow", "location")
_STATUS_SECONDS = 2.0
_MAX_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
_PARSE_IN_THREAD_BYTES = 2**18


class ReplicaRouter:
    """Router of requests to the replicas of one engine.

    Args:
        source: engine of each replica.
        environments: environment variables of each replica's process.
        on_ready: called once all replicas serve.

    Raises:
        ConfigError: the path of the directory of temporary files is too long for sockets.
    """

    def __init__(
        self,
        source: EngineSource,
        settings: ServerSettings,
        environments: Sequence[Mapping[str, str]],
        on_ready: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.counter = RequestCounter()
        self.registry = CollectorRegistry()
        self.metrics = HttpMetrics(self.registry, "router")
        # put sockets into a directory that other users cannot enter
        self._directory = tempfile.TemporaryDirectory(prefix="windlass-")
        if len(os.fsencode(self._socket_path(len(environments)))) > _MAX_SOCKET_PATH_BYTES:
            self._directory.cleanup()
            raise ConfigError(
                f"the directory of temporary files is {tempfile.gettempdir()!r}, which is too long for the paths of "
                "Unix sockets; set TMPDIR to a shorter one"
            )
        self._on_ready = on_ready
        self._ended = asyncio.Event()
        self.replicas = [
            ReplicaSupervisor(index, self._task(source, index), dict(environment), self._ended.set)
            for index, environment in enumerate(environments)
        ]
        self._add_gauges()

    def _socket_path(self, index: int) -> str:
        return os.path.join(self._directory.name, f"{index}.sock")

    def _task(self, source: EngineSource, index: int) -> ReplicaTask:
        settings = self.settings
        # No keys and origins: the router checks them. No drain time: the router drains before it stops replicas.
        inner = {
            "model_names": list(settings.model_names),
            "max_body_bytes": settings.max_body_bytes,
            "max_prompts": settings.max_prompts,
            "max_output_tokens": settings.max_output_tokens,
            "drain_timeout": 0,
            "tool_calls": settings.tool_calls,
            "chat_template": settings.chat_template,
            "engine_index": index,
        }
        return ReplicaTask(source, inner, self._socket_path(index))

    def _add_gauges(self) -> None:
        ready = Gauge("windlass:replica_ready", "1 if the replica serves.", ("engine",), registry=self.registry)
        restarts = Gauge("windlass:replica_restarts", "Restarts of the replica.", ("engine",), registry=self.registry)
        for replica in self.replicas:
            ready.labels(str(replica.index)).set_function(partial(_number, replica, "is_ready"))
            restarts.labels(str(replica.index)).set_function(partial(_number, replica, "restarts"))

    async def start(self) -> None:
        """Start all replicas concurrently.

        Raises:
            ReplicaStartError: a replica ended at its start.
        """
        starts = [asyncio.ensure_future(replica.start()) for replica in self.replicas]
        try:
            done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            for start in done:
                start.result()
        finally:
            for start in starts:
                start.cancel()
        self._on_ready()

    async def wait_for_failure(self) -> None:
        """Return once no replica serves and none will be restarted."""
        while not all(replica.has_given_up for replica in self.replicas):
            self._ended.clear()
            await self._ended.wait()

    async def stop(self) -> None:
        """Stop all replicas."""
        await asyncio.gather(*(replica.stop() for replica in self.replicas))
        self._directory.cleanup()

    def kill(self) -> None:
        """Kill all replicas."""
        for replica in self.replicas:
            replica.kill()
        self._directory.cleanup()

    def ready_replicas(self) -> list[ReplicaSupervisor]:
        """Return the replicas that serve."""
        return [replica for replica in self.replicas if replica.is_ready]

    async def forward(self, request: Request) -> Response:
        """Pass a request on to the best replica and return its answer.

        Raises:
            ApiError: no replica serves, or the replica ended before its answer.
        """
        body = b""
        if request.method not in ("GET", "HEAD"):
            body = await read_body(request, self.settings.max_body_bytes)
        text = await _routing_text_of(body)
        hashes = block_hashes(text)
        ready = self.ready_replicas()
        if not ready:
            raise ApiError(503, "no replica is ready; try again", code="no_replica", retry_after=5)
        chosen, uncached = choose_replica([replica.load for replica in ready], len(text), hashes)
        replica = ready[chosen]
        replica.load.insert(hashes)
        answer = self._exchange(replica, request, body, max(uncached, BLOCK_CHARACTERS))
        try:
            first = await until_disconnect(request, anext(answer))
            assert isinstance(first, ReplicaResponse)
            if first.is_stream:
                begin = await until_disconnect(request, anext(answer))
                assert isinstance(begin, bytes)
                return EventStream(begin, self._events(answer), request.state.request_id)
            content = b"".join([piece async for piece in answer if isinstance(piece, bytes)])
        except ReplicaConnectionError as error:
            raise _replica_ended() from error
        except BaseException:
            await answer.aclose()
            raise
        headers = {name: first.headers[name] for name in _RETURNED_HEADERS if name in first.headers}
        return Response(content, first.status, headers)

    async def _exchange(
        self, replica: ReplicaSupervisor, request: Request, body: bytes, uncached: int
    ) -> AsyncGenerator[ReplicaResponse | bytes, None]:
        """Send a request to a replica; yield its response, then the pieces of the body."""
        load = replica.load
        load.running += 1
        load.prefill += uncached
        waiting = True
        headers = {name: request.headers[name] for name in _FORWARDED_HEADERS if name in request.headers}
        headers["x-request-id"] = request.state.request_id
        target = request.scope.get("raw_path", request.url.path.encode()).decode("latin-1")
        if request.url.query:  # not a part of ASGI's `raw_path`
            target += f"?{request.url.query}"
        try:
            async with request_replica(replica.socket_path, request.method, target, headers, body) as response:
                yield response
                async for piece in response.pieces():
                    if waiting:
                        load.prefill -= uncached
                        waiting = False
                    yield piece
        finally:
            load.running -= 1
            load.prefill -= uncached if waiting else 0

    async def _events(self, answer: AsyncGenerator[ReplicaResponse | bytes, None]) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream.

        Raises:
            ApiError: the replica ended before the end of the stream.
        """
        try:
            async with contextlib.aclosing(answer):
                async for piece in answer:
                    assert isinstance(piece, bytes)
                    yield piece
        except ReplicaConnectionError as error:
            raise _replica_ended() from error

    async def collect_metrics(self) -> bytes:
        """Return the metrics of the router and all replicas."""
        texts = await asyncio.gather(*(_fetch_metrics(replica.socket_path) for replica in self.ready_replicas()))
        return merge_expositions([generate_latest(self.registry).decode(), *texts]).encode()


def build_router_app(router: ReplicaRouter) -> Starlette:
    """Return the ASGI application of a router."""

    async def show_health(request: Request) -> Response:
        failed = router.counter.phase is ServerPhase.FAILED
        ready = [replica.is_ready for replica in router.replicas]
        return json_response({"status": router.counter.phase.value, "replicas": ready}, 503 if failed else 200)

    async def show_readiness(request: Request) -> Response:
        try:
            router.counter.refuse_unless_ready()
            if not router.ready_replicas():
                raise ApiError(503, "no replica is ready; try again", code="no_replica", retry_after=5)
        except ApiError as error:
            return error.response()
        return json_response({"status": router.counter.phase.value})

    async def show_metrics(request: Request) -> Response:
        return Response(await router.collect_metrics(), media_type=CONTENT_TYPE)

    status = (
        ("/", show_page),
        ("/version", show_version),
        ("/health", show_health),
        ("/ready", show_readiness),
        ("/metrics", show_metrics),
    )
    return Starlette(
        routes=[
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in status),
            Route("/{path:path}", router.forward, methods=["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]),
        ],
        middleware=[
            *cors_middleware(router.settings),
            Middleware(RequestGate, settings=router.settings, counter=router.counter, metrics=router.metrics),
        ],
        exception_handlers=error_handlers(),
    )


async def _routing_text_of(body: bytes) -> str:
    def read() -> str:
        try:
            return routing_text(parse_json(body))
        except JsonError:
            return ""  # the replica answers with the error

    return await asyncio.to_thread(read) if len(body) > _PARSE_IN_THREAD_BYTES else read()


async def _fetch_metrics(socket_path: str) -> str:
    try:
        async with asyncio.timeout(_STATUS_SECONDS):
            async with request_replica(socket_path, "GET", "/metrics", {}, b"") as response:
                return (await response.read()).decode()
    except (ReplicaConnectionError, TimeoutError):
        return ""  # the replica is being restarted, as the gauge `windlass:replica_ready` shows


def _number(replica: ReplicaSupervisor, name: str) -> float:
    return float(getattr(replica, name))


def _replica_ended() -> ApiError:
    return ApiError(
        502, "the process that computed this answer ended; send the request again", code="replica_ended", retry_after=1
    )
