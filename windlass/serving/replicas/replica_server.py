"""Server of several replicas of an engine."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from windlass.base.shared_weights_file import create_shared_weights, shared_weights_environment
from windlass.serving.engine_loading import EngineSource
from windlass.serving.http_server import HttpServer
from windlass.serving.replicas.replica_router import ReplicaRouter, build_router_app
from windlass.serving.server_settings import ServerSettings


def serve_replicas(
    source: EngineSource,
    settings: ServerSettings,
    count: int,
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> int:
    """Serve `count` replicas on a bound socket until a signal. Return the exit code of the process.

    Raises:
        ReplicaStartError: a replica ended at its start.
    """

    async def run() -> int:
        shared = create_shared_weights()
        environment = {**replica_environment(source, count), **shared_weights_environment(shared)}
        router = ReplicaRouter(source, settings, count, environment, on_ready)
        app = build_router_app(router)
        return await HttpServer(app, router, router.counter, listener, settings.drain_timeout).run()

    return asyncio.run(run())


def replica_environment(source: EngineSource, count: int) -> dict[str, str]:
    """Return the environment of a replica: the share of the cores of each of its ranks, unless OMP_NUM_THREADS is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // (count * source.num_ranks))), **os.environ}
