"""Tests of `windlass serve` with a model over several ranks, which the command starts by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.serving.harness import wait_until
from tests.serving.tiny_model import write_tiny_model
from windlass.serving.engine_loading import EngineSource
from windlass.serving.replicas.replica_server import replica_environments

BODY = {"model": "m", "prompt": "abc", "max_tokens": 12, "temperature": 0}
SMALL = ("--kv-cache-tokens", "256", "--max-model-len", "128", "--max-sequences", "4", "--served-model-name", "m")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class Server:
    """`windlass serve` in a process of its own."""

    def __init__(self, directory: Path, tmp_path: Path, *options: str) -> None:
        self.port = free_port()
        self._log = tmp_path / "log"
        command = [sys.executable, "-m", "windlass", "serve", str(directory), "--port", str(self.port)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*command, *SMALL, *options], stdout=log, stderr=log)

    def log(self) -> str:
        return self._log.read_text()

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=240)
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        finally:
            connection.close()

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            return True
        try:
            return self.request("GET", "/ready")[0] == 200
        except OSError:
            return False

    def workers(self) -> list[int]:
        """Return the process ids of the ranks except rank 0, which is a child of the router."""
        ranks = [pid for replica in _children(self.process.pid) for pid in _children(replica)]
        return [pid for pid in ranks if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@cache
def answer_of_one_rank(directory: Path) -> str:
    from windlass import LLM, SamplingParams

    with LLM(directory, kv_cache_tokens=256, max_model_len=128, max_sequences=4) as llm:
        return llm.generate("abc", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text


def require_answer(server: Server, directory: Path) -> None:
    """Wait until the server is ready, and compare its answer with that of one rank."""
    wait_until(server.is_ready)
    assert server.process.poll() is None, server.log()
    status, body = server.request("POST", "/v1/completions", BODY)
    assert status == 200, body
    assert body["choices"][0]["text"] == answer_of_one_rank(directory)


@pytest.mark.slow  # The next test covers two ranks, and `test_server_process.py` the end of a server.
def test_one_command_serves_a_model_over_two_ranks(directory: Path, tmp_path: Path) -> None:
    with Server(directory, tmp_path, "--tp", "2") as server:
        require_answer(server, directory)
        (worker,) = server.workers()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0, server.log()
        assert not Path(f"/proc/{worker}").exists()
        assert "Traceback" not in server.log()


@pytest.mark.slow  # `test_server_process.py` tests a replica of one rank that dies.
def test_a_rank_that_dies_fails_its_requests_and_is_started_again(directory: Path, tmp_path: Path) -> None:
    """Two stages answer, lose a rank during a request, and answer again after the restart."""
    with Server(directory, tmp_path, "--pp", "2") as server:
        require_answer(server, directory)
        (worker,) = server.workers()
        os.kill(worker, signal.SIGSTOP)  # the next step waits for this rank
        import threading

        found: list[int] = []
        asking = threading.Thread(target=lambda: found.append(server.request("POST", "/v1/completions", BODY)[0]))
        asking.start()
        wait_until(lambda: _running(server) == 1)
        os.kill(worker, signal.SIGKILL)
        asking.join(120)
        assert found in ([500], [502])  # the replica answers, or the router if the replica has ended
        wait_until(lambda: server.process.poll() is not None or server.workers() not in ([], [worker]))
        require_answer(server, directory)
        assert "rank 1 of the model ended by SIGKILL" in server.log()
        assert "replica 0 ended with exit code 3; its requests failed" in server.log()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0, server.log()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # the process has ended
        return []


def _running(server: Server) -> float:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "num_requests_running{" in line)


@pytest.mark.slow  # `test_server_process.py` tests this on one rank.
def test_an_error_at_the_start_is_a_message(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", num_hidden_layers=1)
    with Server(directory, tmp_path, "--pp", "2") as server:
        assert server.process.wait(240) == 1
        assert "can't be split into stages" in server.log(), server.log()
        assert "Traceback" not in server.log()


def test_a_rank_that_dies_at_the_start_ends_the_server(directory: Path, tmp_path: Path) -> None:
    with Server(directory, tmp_path, "--pp", "2") as server:
        wait_until(lambda: server.process.poll() is not None or bool(server.workers()))
        os.kill(server.workers()[0], signal.SIGKILL)
        assert server.process.wait(120) == 128 + signal.SIGKILL, server.log()
        assert "rank 1 of the model ended by SIGKILL" in server.log()


@pytest.mark.parametrize(("options", "threads"), [({}, "4"), ({"tp": 2}, "2"), ({"tp": 4, "pp": 4}, "1")])
def test_ranks_of_replicas_share_the_cores(
    options: dict[str, int], threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    both = replica_environments(EngineSource("model", options), 2, num_devices=0)
    assert [one["OMP_NUM_THREADS"] for one in both] == [threads, threads]


@pytest.mark.parametrize(
    ("tp", "visible", "devices"),
    [
        (1, None, ["0", "1", "2"]),
        (1, "5,7,6", ["5", "7", "6"]),
        (2, "4,5,6,7,8,9", ["4,5", "6,7", "8,9"]),
        (2, "4,5,6", ["4,5", "4,5", "4,5"]),
        (4, "4,5,6", ["4,5,6", "4,5,6", "4,5,6"]),
    ],
)
def test_gpus_are_divided_among_replicas_or_shared(
    tp: int, visible: str | None, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    count = 8 if visible is None else len(visible.split(","))
    found = replica_environments(EngineSource("model", {"tp": tp}), 3, num_devices=count)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == devices
    on_cpu = replica_environments(EngineSource("model", {"tp": tp}), 3, num_devices=0)
    assert all(one.get("CUDA_VISIBLE_DEVICES") == visible for one in on_cpu)
