"""Tests of the start and restart of replicas after unreadable answers, unexpected errors and unusable paths, and of the
requests that replicas receive."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.serving.harness import settings_with
from windlass.base.errors import ConfigError
from windlass.serving.engine_loading import EngineSource
from windlass.serving.replicas import replica_router
from windlass.serving.replicas.replica_client import ReplicaResponse
from windlass.serving.replicas.replica_process import ReplicaTask
from windlass.serving.replicas.replica_router import ReplicaRouter, build_router_app
from windlass.serving.replicas.replica_supervisor import ReplicaStartError, ReplicaSupervisor, RestartPolicy
from windlass.serving.request_counter import ServerPhase


def supervisor_of(directory: Path, ended: list[int]) -> ReplicaSupervisor:
    task = ReplicaTask(EngineSource("fake"), {}, str(directory / "0.sock"))
    return ReplicaSupervisor(0, task, dict(os.environ), lambda: ended.append(0))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("printf '{\"error'", "replica 0 ended at its start with exit code 0"),
        ("echo '{\"error'; exec sleep 600", "the answer of replica 0 cannot be read: Invalid control character"),
        ("head -c 5000000 /dev/zero; exec sleep 600", "the answer of replica 0 cannot be read: Separator is not found"),
        ('echo \'{"error": "no room"}\'', "no room"),
    ],
)
def test_an_answer_that_cannot_be_read_is_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(program))

    async def start() -> int | None:
        replica = supervisor_of(tmp_path, [])
        with pytest.raises(ReplicaStartError) as raised:
            await replica.start()
        assert str(raised.value).startswith(message)
        assert replica._process is not None
        return replica._process.returncode

    assert asyncio.run(start()) is not None


def test_an_unexpected_error_of_a_restart_counts_as_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pause_after = RestartPolicy.pause_after
    monkeypatch.setattr(
        RestartPolicy, "pause_after", lambda self, served: None if pause_after(self, served) is None else 0.0
    )
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho '{\"ready\": true}'\n")
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(program))
    ended: list[int] = []

    async def run() -> ReplicaSupervisor:
        replica = supervisor_of(tmp_path, ended)
        await replica.start()

        async def fail() -> None:
            raise ZeroDivisionError("a bug of the router")

        monkeypatch.setattr(replica, "_start_once", fail)
        assert replica._watching is not None
        await replica._watching
        return replica

    replica = asyncio.run(run())
    assert replica.has_given_up and ended == [0] and not replica.is_ready
    assert replica.restarts == 5 and caplog.text.count("ZeroDivisionError: a bug of the router") == 5


def test_a_process_that_an_unexpected_error_leaves_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RestartPolicy, "pause_after", lambda self, served: None if served is None else 0.0)
    program, numbers = tmp_path / "program", tmp_path / "numbers"
    later = f"echo $$ > {numbers}; echo '[]'; exec sleep 600"
    program.write_text(f"#!/bin/sh\nif mkdir {tmp_path}/first; then echo '{{\"ready\": true}}'; else {later}; fi\n")
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(program))

    async def run() -> int:
        replica = supervisor_of(tmp_path, [])
        await replica.start()
        assert replica._watching is not None and replica._process is not None
        await replica._watching
        try:
            return await asyncio.wait_for(replica._process.wait(), 20)
        finally:
            await replica.stop()

    assert asyncio.run(run()) == -9
    assert numbers.exists()


def test_the_longest_path_of_a_socket_is_that_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for length in (replica_router._MAX_SOCKET_PATH_BYTES, replica_router._MAX_SOCKET_PATH_BYTES + 1):
        fits = length == replica_router._MAX_SOCKET_PATH_BYTES
        refused = contextlib.nullcontext() if fits else pytest.raises(OSError, match="too long")
        with socket.socket(socket.AF_UNIX) as listener, refused:
            listener.bind("a" * length)


def test_a_replica_whose_log_nobody_reads_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    program = tmp_path / "program"
    line = "a" * 1000
    script = (
        f"yes {line} | head -c 3000000 >&2; echo '{{\"ready\": true}}'; exec sleep 600"  # more than asyncio reads ahead
    )
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr("sys.stderr", Closed())

    async def run() -> None:
        replica = supervisor_of(tmp_path, [])
        await asyncio.wait_for(replica.start(), 30)
        await replica.stop()

    asyncio.run(run())


def test_a_long_directory_of_temporary_files_is_an_error_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ("a" * 100)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter one"):
        ReplicaRouter(EngineSource("fake"), settings_with(), [{}, {}], lambda: None)
    assert not list(directory.iterdir())


def test_the_query_of_a_request_reaches_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[str] = []

    @contextlib.asynccontextmanager
    async def answer(path: str, method: str, target: str, *rest: Any) -> AsyncIterator[ReplicaResponse]:
        targets.append(target)
        yield ReplicaResponse(200, {}, asyncio.StreamReader())

    monkeypatch.setattr(replica_router, "request_replica", answer)
    router = ReplicaRouter(EngineSource("fake"), settings_with(), [{}], lambda: None)
    router.replicas[0].is_ready = True
    router.counter.phase = ServerPhase.READY
    with TestClient(build_router_app(router)) as client:
        for target in ("/v1/models", "/v1/a%20b?name=c%20d&e"):
            assert client.get(target).status_code == 200
    router.kill()
    assert targets == ["/v1/models", "/v1/a%20b?name=c%20d&e"]
