"""Tests of the application for Ray Serve: with a stand-in for its two decorators, and with Ray itself."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from tests.serving.harness import FACTORY
from windlass.base.errors import ConfigError, ModelError


class _RayServeStandIn(ModuleType):
    """The two decorators of `ray.serve`, which record their arguments."""

    def __init__(self) -> None:
        super().__init__("ray.serve")
        self.options: dict[str, Any] = {}
        self.build: Any = None

    def deployment(self, **options: Any) -> Any:
        self.options = options

        def decorate(replica: Any) -> Any:
            replica.bind = lambda: replica
            return replica

        return decorate

    def ingress(self, build: Any) -> Any:
        self.build = build
        return lambda replica: type(replica.__name__, (replica,), {})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> _RayServeStandIn:
    stand_in = _RayServeStandIn()
    ray = ModuleType("ray")
    ray.serve = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", stand_in)
    return stand_in


def test_a_replica_serves_once_its_engine_is_loaded_and_reports_its_failure(serve: _RayServeStandIn) -> None:
    from windlass.serving import ray_app

    replica = ray_app.build_app(
        "fake",
        served_model_name="m",
        num_replicas=3,
        ray_actor_options={"num_cpus": 2},
        deployment_options={"graceful_shutdown_timeout_s": 60},
        server_options={"max_prompts": 2},
        factory=FACTORY,
        max_model_len=100,
    )
    assert serve.options == {
        "name": "windlass",
        "num_replicas": 3,
        "max_ongoing_requests": 256,
        "ray_actor_options": {"num_cpus": 2},
        "graceful_shutdown_timeout_s": 60,
    }
    with TestClient(serve.build()) as client:
        answer = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4}).json()
        assert answer["choices"][0]["text"] == "abca" and answer["model"] == "m"
        assert client.post("/v1/completions", json={"prompt": ["a"] * 3}).status_code == 400
        replica().check_health()
        engine: Any = ray_app._replica_context.engine  # type: ignore[union-attr]
        engine.is_healthy, engine.error = False, RuntimeError("the device is gone")
        with pytest.raises(ModelError, match="the device is gone"):
            replica().check_health()
    assert not engine.is_started


def test_a_model_that_cannot_be_loaded_is_an_error_of_the_start(serve: _RayServeStandIn) -> None:
    from windlass.serving.ray_app import build_app

    build_app("broken", factory=FACTORY)
    with pytest.raises(ConfigError, match="the model is broken"), TestClient(serve.build()):
        pass


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.serving.ray_app import build_app

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"windlass\[ray\]"):
        build_app("fake")


@pytest.mark.peer
def test_ray_serves_openais_client_on_two_replicas() -> None:
    """Needs `pip install 'ray[serve]'`."""
    import ray
    from ray import serve

    from tests.ports import free_port
    from windlass.serving.ray_app import build_app

    port = free_port()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        app = build_app("fake", num_replicas=2, factory=FACTORY, ray_actor_options={"num_cpus": 0.5}, step_seconds=0.01)
        serve.run(app, name="m", route_prefix="/")
        asyncio.run(_ask(f"http://127.0.0.1:{port}/v1"))
    finally:
        serve.shutdown()
        ray.shutdown()


async def _ask(address: str) -> None:
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:

        async def complete(number: int) -> None:
            stream = await client.completions.create(model="fake", prompt=f"<{number}>", max_tokens=9, stream=True)
            text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text == (f"<{number}>" * 9)[:9]

        await asyncio.gather(*(complete(number) for number in range(40)))
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model="fake", prompt="a", temperature=-1)
