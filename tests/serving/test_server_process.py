"""Tests of a server's life: start, drain, second signal, failures, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.serving.harness import WAIT_SECONDS, ServerProcess, wait_until
from windlass.serving.replicas.replica_supervisor import send_signal

TEXT = "/v1/completions"


def test_sigterm_drains_and_ends_with_0(tmp_path: Path) -> None:
    gate = tmp_path / "gate"  # the request runs until this file exists
    with ServerProcess(tmp_path, step_seconds=0.01, gate=str(gate)) as server:
        server.wait_until_ready()
        response = server.open("POST", TEXT, {"prompt": "abc", "max_tokens": 40, "stream": True})
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.request("GET", "/ready")[0] == 503)
        assert server.request("GET", "/health")[0] == 200
        status, body = server.request("POST", TEXT, {"prompt": "abc"})
        assert status == 503 and json.loads(body)["error"]["code"] == "draining"
        gate.touch()
        rest = response.read().decode()
        assert rest.endswith("data: [DONE]\n\n") and rest.count('"text":') == 39
        assert server.process.wait(WAIT_SECONDS) == 0
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("replicas", [1, 2])
def test_requests_that_outlast_the_drain_are_cut_with_a_last_event(tmp_path: Path, replicas: int) -> None:
    with ServerProcess(tmp_path, replicas=replicas, step_seconds=0.05, drain_timeout=0.3) as server:
        server.wait_until_ready()
        response = server.open("POST", TEXT, {"prompt": "abc", "max_tokens": 500, "stream": True})
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        rest = response.read().decode()
        assert rest.endswith("data: [DONE]\n\n") and '"code":"draining"' in rest
        assert server.process.wait(WAIT_SECONDS) == 0
        assert "1 request did not end in time" in server.log()


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, step_seconds=0.05, drain_timeout=1000) as server:
        server.wait_until_ready()
        response = server.open("POST", TEXT, {"prompt": "abc", "max_tokens": 500, "stream": True})
        response.readline()
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.request("GET", "/ready")[0] == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_SECONDS) == 128 + signal.SIGTERM


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_error_at_start_is_the_whole_message(tmp_path: Path, replicas: int) -> None:
    with ServerProcess(tmp_path, model="broken", replicas=replicas) as server:
        assert server.process.wait(WAIT_SECONDS) == 1
        assert server.log() == "windlass: the model is broken\n"


def test_a_bug_at_start_shows_its_traceback(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, model="bug") as server:
        assert server.process.wait(WAIT_SECONDS) == 1
        assert "ZeroDivisionError: a bug at load" in server.log()


def test_a_bug_at_the_start_of_a_replica_shows_its_traceback(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, model="bug", replicas=2) as server:
        assert server.process.wait(WAIT_SECONDS) == 1
        # Both replicas fail, and the first failure ends the server.
        assert re.search(r"^\[replica [01]\] ZeroDivisionError: a bug at load$", server.log(), re.MULTILINE)
        assert "\nwindlass: ZeroDivisionError: a bug at load; its traceback is above\n" in server.log()


@pytest.mark.parametrize(
    ("exits", "code", "words"), [(9, 9, "with exit code 9"), (0, 1, "with exit code 0"), (-9, 137, "by SIGKILL")]
)
def test_a_replica_that_dies_at_start_ends_the_server_with_its_exit_code(
    tmp_path: Path, exits: int, code: int, words: str
) -> None:
    with ServerProcess(tmp_path, model="dies", replicas=2, exits=exits) as server:
        assert server.process.wait(WAIT_SECONDS) == code
        assert f"ended at its start {words}" in server.log()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_huge_body_gets_413_and_is_not_kept(tmp_path: Path, replicas: int) -> None:
    with ServerProcess(tmp_path, replicas=replicas, max_body_bytes=10_000) as server:
        server.wait_until_ready()
        assert server.request("POST", TEXT, {"prompt": "abc", "max_tokens": 3})[0] == 200
        peak = _peak_bytes(server.process.pid)
        connection = HTTPConnection("127.0.0.1", server.port, timeout=WAIT_SECONDS)
        headers = {"Content-Type": "application/json"}
        # a chunked body without a declared length, and a body with one; both are sent to their end
        for length in ({}, {"Content-Length": str(100 * 2**20)}):
            pieces = (b"x" * 2**20 for _ in range(100))
            connection.request("POST", TEXT, pieces, {**headers, **length}, encode_chunked=not length)
            answer = connection.getresponse()
            assert answer.status == 413 and "10,000 bytes" in answer.read().decode()
        connection.close()
        assert _peak_bytes(server.process.pid) < peak + 16 * 2**20
        assert server.request("POST", TEXT, {"prompt": "abc", "max_tokens": 3})[0] == 200


def _peak_bytes(pid: int) -> int:
    """Return the peak of the resident memory of a process."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        server.wait_until_ready()
        code = (
            "from windlass.serving.http_server import bind_socket\n"
            "from windlass.base.errors import ConfigError\n"
            f"try: bind_socket('127.0.0.1', {server.port})\n"
            "except ConfigError as error: print(error)"
        )
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert output.startswith(f"port {server.port} of 127.0.0.1 is in use; stop the process")


def test_an_engine_that_fails_ends_the_server_with_its_own_exit_code(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, fails_at="x") as server:
        server.wait_until_ready()
        assert server.request("POST", TEXT, {"prompt": "abc", "max_tokens": 3})[0] == 200
        status, body = server.request("POST", TEXT, {"prompt": "x", "max_tokens": 3})
        assert status == 500 and "the device is gone" not in body
        assert server.process.wait(WAIT_SECONDS) == 3
        assert "the device is gone" in server.log()


def test_a_replica_that_dies_fails_its_requests_alone_and_is_started_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"  # the requests run until this file exists
    with ServerProcess(tmp_path, replicas=2, step_seconds=0.01, gate=str(gate)) as server:
        server.wait_until_ready()
        # two conversations with different beginnings go to different replicas
        streams = [
            server.open("POST", TEXT, {"prompt": letter * 200, "max_tokens": 60, "stream": True}) for letter in "ab"
        ]
        for stream in streams:
            assert stream.readline().startswith(b"data: {")
        children = _children(server.process.pid)
        assert len(children) == 2
        os.kill(children[0], signal.SIGKILL)
        gate.touch()
        rests = [stream.read().decode() for stream in streams]
        failed = ["replica_ended" in rest for rest in rests]
        assert sorted(failed) == [False, True]
        assert all(rest.endswith("data: [DONE]\n\n") for rest in rests)
        assert rests[failed.index(False)].count('"text":') == 59
        wait_until(lambda: json.loads(server.request("GET", "/health")[1])["replicas"] == [True, True])
        assert "ended by SIGKILL; its requests failed" in server.log()
        assert children[0] not in _children(server.process.pid)
        for letter in "abcd":
            assert server.request("POST", TEXT, {"prompt": letter, "max_tokens": 3})[0] == 200
        metrics = server.request("GET", "/metrics")[1]
        assert 'windlass:replica_restarts{engine="0"} 1.0' in metrics or (
            'windlass:replica_restarts{engine="1"} 1.0' in metrics
        )
        assert metrics.count("# TYPE vllm:generation_tokens_total counter") == 1
        assert metrics.count("\nvllm:generation_tokens_total{") == 2


def test_a_single_replica_that_dies_is_started_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"  # the request runs until this file exists
    with ServerProcess(tmp_path, has_router=True, step_seconds=0.01, gate=str(gate)) as server:
        server.wait_until_ready()
        stream = server.open("POST", TEXT, {"prompt": "a", "max_tokens": 60, "stream": True})
        stream.readline()
        (child,) = _children(server.process.pid)
        os.kill(child, signal.SIGKILL)
        rest = stream.read().decode()
        assert "replica_ended" in rest and rest.endswith("data: [DONE]\n\n")
        gate.touch()
        wait_until(lambda: server.request("POST", TEXT, {"prompt": "a", "max_tokens": 3})[0] == 200)
        assert "replica 0 ended by SIGKILL; its requests failed" in server.log()
        assert child not in _children(server.process.pid)


def test_equal_prefixes_go_to_one_replica_and_others_to_the_other(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, replicas=2, max_model_len=4096) as server:
        server.wait_until_ready()
        connection = HTTPConnection("127.0.0.1", server.port, timeout=WAIT_SECONDS)
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        connection.request("POST", TEXT, b"\x1f\x8b", headers)
        assert connection.getresponse().status == 415  # from the router, which forwards no encoded body
        connection.close()
        redirect = server.open("POST", f"{TEXT}/", {"prompt": "a"})
        assert (redirect.status, redirect.headers["location"]) == (307, f"http://127.0.0.1:{server.port}{TEXT}")
        status, text = server.request("PROPFIND", TEXT)
        assert status == 405 and json.loads(text)["error"]["code"] == "method_not_allowed"
        for turn in range(1, 6):
            for letter in "ab":
                body = {"messages": [{"role": "user", "content": letter * 200}] * turn, "max_tokens": 1}
                assert server.request("POST", "/v1/chat/completions", body)[0] == 200
        lines = [line for line in server.request("GET", "/metrics")[1].splitlines() if "prompt_tokens_total{" in line]
        counts = [float(line.rsplit(" ", 1)[1]) for line in lines]
        assert len(counts) == 2 and counts[0] == counts[1] > 0


def test_a_drain_of_replicas_ends_their_processes(tmp_path: Path) -> None:
    gate = tmp_path / "gate"  # the request runs until this file exists
    with ServerProcess(tmp_path, replicas=2, step_seconds=0.01, gate=str(gate)) as server:
        server.wait_until_ready()
        response = server.open("POST", TEXT, {"prompt": "abc", "max_tokens": 30, "stream": True})
        response.readline()
        children = _children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.request("GET", "/ready")[0] == 503)
        gate.touch()
        assert response.read().decode().count('"text":') == 29
        assert server.process.wait(WAIT_SECONDS) == 0
        assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_replicas_end_with_a_router_that_was_killed(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, replicas=2) as server:
        server.wait_until_ready()
        children = _children(server.process.pid)
        server.process.kill()
        wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def test_a_client_that_leaves_ends_its_request_behind_a_router(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, replicas=2, step_seconds=0.05) as server:
        server.wait_until_ready()
        response = server.open("POST", TEXT, {"prompt": "abc", "max_tokens": 500, "stream": True})
        response.readline()
        assert _running(server) == 1
        assert server.request("HEAD", "/v1/models") == (200, "")
        response.close()
        wait_until(lambda: _running(server) == 0)


def _running(server: ServerProcess) -> float:
    lines = server.request("GET", "/metrics")[1].splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_broken_client_does_no_harm(tmp_path: Path) -> None:
    """One client sends half a request, the other one garbage, and both reset their connections."""
    import socket
    import struct

    with ServerProcess(tmp_path) as server:
        server.wait_until_ready()
        for data in (
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{",
            b"\x00\xff\x16\x03 nonsense\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(data)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(0.1)
        assert server.request("POST", TEXT, {"prompt": "abc", "max_tokens": 3})[0] == 200
        assert "Traceback" not in server.log()


def test_a_signal_leaves_the_exit_status_of_an_ended_process() -> None:
    """The event loop waits for the status, and reports 255 if other code has collected it."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import os; os._exit(7)"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    send_signal(cast(Any, SimpleNamespace(pid=child.pid, returncode=None)), signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 7
    child.wait()
