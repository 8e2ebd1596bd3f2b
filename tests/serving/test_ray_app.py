"""Tests of the application for Ray Serve: with a stand-in for its two decorators, and with Ray itself."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from tests.serving.harness import FACTORY
from tests.serving.tiny_model import write_tiny_model
from windlass import LLM, SamplingParams
from windlass.base.errors import ConfigError, ModelError

REPLICA = """
import json, sys
from starlette.testclient import TestClient
from windlass.serving.engine_loading import EngineSource
from windlass.serving.ray_app import _build_replica_app
from windlass.serving.server_settings import ServerSettings

options = {"tp": 2, "kv_cache_tokens": 256, "max_model_len": 128, "max_sequences": 4}
app = _build_replica_app(EngineSource(sys.argv[1], options), ServerSettings(model_names=("m",)))
with TestClient(app) as client:
    body = {"prompt": [3, 4, 5], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    print(json.dumps(answer.json()["choices"][0]["token_ids"]))
"""


class _RayServeStandIn(ModuleType):
    """Module with the two decorators of `ray.serve`, which record their arguments."""

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
        backend: Any = ray_app._replica_backend
        ranks = backend._ranks
        backend._ranks = SimpleNamespace(failure="rank 1 of the model ended with exit code 1")
        with pytest.raises(ModelError, match="rank 1 of the model ended"):
            replica().check_health()
        backend._ranks = ranks
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


@pytest.mark.slow  # starts a process that imports torch; `test_sharded_server.py` tests the same ranks
def test_a_replica_starts_the_other_ranks_of_its_model(tmp_path: Path) -> None:
    """The replica runs in a process of its own, since it becomes rank 0 of a process group."""
    directory = write_tiny_model(tmp_path / "model")
    program = tmp_path / "replica.py"
    program.write_text(REPLICA)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program), str(directory)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    with LLM(directory, kv_cache_tokens=256, max_model_len=128, max_sequences=4) as llm:
        expected = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert json.loads(done.stdout.splitlines()[-1]) == list(expected[0].outputs[0].token_ids)


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
