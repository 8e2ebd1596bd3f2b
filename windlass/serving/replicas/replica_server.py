"""Server of an engine's replicas."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from windlass.base.log import logger
from windlass.base.shared_weights_file import create_shared_weights, shared_weights_environment
from windlass.base.text import plural
from windlass.launch.visible_devices import VISIBLE_DEVICES_VARIABLE, available_devices, count_devices
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
    """Serve `count` replicas on a bound socket until a signal, or until all have failed. Return the exit code.

    Raises:
        ReplicaStartError: a replica ended at its start.
        ConfigError: the path of the directory of temporary files is too long for sockets.
    """

    async def run() -> int:
        shared = create_shared_weights() if count > 1 else None
        environments = [
            {**environment, **shared_weights_environment(shared)}
            for environment in replica_environments(source, count, count_devices())
        ]
        router = ReplicaRouter(source, settings, environments, on_ready)
        app = build_router_app(router)
        return await HttpServer(app, router, router.counter, listener, settings.drain_timeout).run()

    return asyncio.run(run())


def replica_environments(source: EngineSource, count: int, num_devices: int) -> list[dict[str, str]]:
    """Return the environment variables of each replica: those of this process; the replica's GPUs, one for each rank;
    and, unless it is set, OMP_NUM_THREADS: the number of cores for each rank. With fewer GPUs than a replica has ranks,
    no GPUs are assigned.

    Args:
        num_devices: number of GPUs that are visible to this process. Replicas share GPUs if there are too few.
    """
    ranks = source.num_ranks
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = {"OMP_NUM_THREADS": str(max(1, cores // (count * ranks))), **os.environ}
    devices = available_devices(os.environ, num_devices)
    groups = [devices[first : first + ranks] for first in range(0, len(devices) - ranks + 1, ranks)]
    if not groups:  # no GPUs, or fewer than a replica has ranks
        return [dict(shared) for _ in range(count)]
    if len(groups) < count:
        logger.warning(
            "%d replicas of %s share %s; set --kv-cache-tokens, because each would size its KV cache for a whole GPU",
            count, plural(ranks, "rank"), plural(len(devices), "GPU"),
        )  # fmt: skip
    return [{**shared, VISIBLE_DEVICES_VARIABLE: ",".join(groups[index % len(groups)])} for index in range(count)]
