"""Application for Ray Serve, which starts replicas on several hosts and spreads requests over them.

    from windlass.serving.ray_app import build_app
    app = build_app("path/of/the/model", num_replicas=4)        # then: serve run module:app

Each replica is one actor of Ray with an engine of its own. The actor starts the other ranks of a model that is sharded
by `tp`, `pp` or `ep` on its own host.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.applications import Starlette

from windlass.base.errors import ConfigError, ModelError
from windlass.serving.engine_loading import DEFAULT_FACTORY, EngineSource
from windlass.serving.engine_server import EngineBackend
from windlass.serving.http_app import build_http_app
from windlass.serving.server_context import ServerContext
from windlass.serving.server_settings import ApiKeys, ServerSettings

# context and engine of this process's replica; each actor of Ray is a process with one replica
_replica_context: ServerContext | None = None
_replica_backend: EngineBackend | None = None


def build_app(
    model: str,
    *,
    served_model_name: str | None = None,
    api_keys: list[str] | None = None,
    num_replicas: int | str = 1,
    max_ongoing_requests: int = 256,
    ray_actor_options: Mapping[str, Any] | None = None,
    deployment_options: Mapping[str, Any] | None = None,
    server_options: Mapping[str, Any] | None = None,
    factory: str = DEFAULT_FACTORY,
    **engine_options: Any,
) -> Any:
    """Return an application of Ray Serve with the endpoints of `windlass serve`.

    Args:
        model: directory of the model, which each host must be able to read.
        served_model_name: name of the model in requests; None: `model`.
        api_keys: API keys; each request needs one of them. None: requests need no key.
        num_replicas: number of replicas, or "auto" for Ray's autoscaling.
        max_ongoing_requests: requests that a replica takes at the same time; Ray keeps further ones in its own queue.
        ray_actor_options: resources of a replica, e.g. `{"num_cpus": 8, "num_gpus": 1}`.
        deployment_options: further arguments of `ray.serve.deployment`.
        server_options: further fields of `ServerSettings`.
        factory: `module:function` that makes the engine from the model and the options.
        engine_options: options of the engine, as for `windlass.LLM`.

    Raises:
        ConfigError: Ray is not installed, or an option is out of range.
    """
    serve = _import_ray_serve()
    settings = ServerSettings(
        model_names=(served_model_name or model,),
        api_keys=None if api_keys is None else ApiKeys(api_keys),
        **dict(server_options or {}),
    )
    source = EngineSource(model, engine_options, factory)

    def build() -> Starlette:
        return _build_replica_app(source, settings)

    deployment = serve.deployment(
        name="windlass",
        num_replicas=num_replicas,
        max_ongoing_requests=max_ongoing_requests,
        ray_actor_options=dict(ray_actor_options or {}),
        **dict(deployment_options or {}),
    )
    return deployment(serve.ingress(build)(ServedReplica)).bind()


class ServedReplica:
    """Replica that passes requests to the application. Ray queries its health."""

    def check_health(self) -> None:
        """Raise if the engine has failed or a rank of the model has ended; Ray then starts the replica anew.

        Raises:
            ModelError: the engine has failed, or the process of another rank has ended.
        """
        engine = None if _replica_context is None else _replica_context.loaded_engine
        if engine is not None and not engine.is_healthy:
            raise ModelError(f"the engine of the replica has failed: {engine.error}") from engine.error
        lost = None if _replica_backend is None else _replica_backend.lost_rank
        if engine is not None and lost is not None:
            raise ModelError(f"{lost}; the model cannot be served without it")


def _build_replica_app(source: EngineSource, settings: ServerSettings) -> Starlette:
    """Return the application of one replica, which loads its engine before the first request."""
    global _replica_context, _replica_backend
    context = _replica_context = ServerContext(settings)
    app = build_http_app(context)
    backend = _replica_backend = EngineBackend(source, context)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            await backend.start()
            yield
        finally:
            await backend.stop()

    app.router.lifespan_context = lifespan
    return app


def _import_ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError("build_app needs Ray Serve: pip install 'windlass[ray]'") from error
    return serve
