"""Closed-loop clients of servers with OpenAI's completions API, and processes of such servers."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

Load = Sequence[tuple[list[int], int]]
"""Prompts, each with the number of tokens of its answer."""


class Server:
    """Process of a server on a free port of the loopback interface.

    Args:
        command: words of the command; one contains `{port}`.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        with log.open("wb") as output:
            filled = [part.format(port=self.port) for part in command]
            self.process = subprocess.Popen(filled, stdout=output, stderr=output, start_new_session=True)
        for _ in range(600):
            if self.process.poll() is not None:
                raise SystemExit(f"{command[0]} has ended; see {log}")
            try:
                path = "/ready" if "serve" in command else "/health"
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2):
                    return
            except OSError:  # the server does not listen yet, or returns 503 while it loads the model
                time.sleep(0.2)
        raise SystemExit(f"{command[0]} is not ready; see {log}")

    def metrics(self) -> dict[str, float]:
        """Return windlass's metrics by name."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name.partition("{")[0]: float(value) for name, _, value in pairs}

    def resident(self) -> dict[str, int]:
        """Return resident bytes: all (`VmRSS`), and those of anonymous pages (`RssAnon`)."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon")}

    def stop(self) -> None:
        """Stop the process and its children."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def run_clients(
    port: int, model: str, load: Load, clients: int, at_full_load: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Send the load, `clients` requests at a time, and return tokens per second and times in milliseconds.

    Args:
        at_full_load: called twice: after as many answers as there are clients, and before the last request is sent.
            Between the two calls every client has a request.
    """
    places = iter(enumerate(load))
    marks = {2 * clients - 1, len(load) - 1}
    firsts: list[float] = []
    gaps: list[float] = []
    errors: list[Exception] = []

    def client() -> None:
        for number, (prompt, tokens) in places:  # all threads share this iterator, which the GIL makes safe
            try:
                if number in marks:
                    at_full_load()
                times = _ask(port, model, prompt, tokens)
            except (OSError, RuntimeError) as error:
                errors.append(error)
                return
            firsts.append(times[1] - times[0])
            gaps.extend(after - before for before, after in zip(times[1:], times[2:], strict=False))

    began = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if errors:
        raise SystemExit(f"a request failed: {errors[0]}")
    return {
        "generated_per_second": sum(tokens for _, tokens in load) / seconds,
        "first_token_p50_ms": _percentile(firsts, 0.5),
        "first_token_p95_ms": _percentile(firsts, 0.95),
        "gap_p50_ms": _percentile(gaps, 0.5),
        "gap_p95_ms": _percentile(gaps, 0.95),
    }


def _ask(port: int, model: str, prompt: list[int], tokens: int) -> list[float]:
    """Return the times at which the request was sent and at which each of its events arrived."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}
    body |= {"ignore_eos": True}
    if model != "windlass":
        body["cache_prompt"] = False  # field of llama-server; windlass refuses unknown fields
    times = [time.perf_counter()]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status} {answer.read(300)!r}")
    for line in answer:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    connection.close()
    return times


def _percentile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] * 1e3 if ordered else 0.0
