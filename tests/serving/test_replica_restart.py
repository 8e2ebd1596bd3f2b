"""Tests of the start and restart of a replica whose process answers with something else than expected."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from windlass.serving.engine_loading import EngineSource
from windlass.serving.replicas.replica_process import ReplicaTask
from windlass.serving.replicas.replica_supervisor import ReplicaStartError, ReplicaSupervisor, RestartPolicy


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
