"""Process of `windlass serve` that an experiment starts, queries and stops."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from windlass.base.errors import WindlassError

_START_SECONDS = 300.0
_STOP_SECONDS = 60.0


class ServerUnderTest:
    """Server of a model on a free port of the loopback interface.

    Args:
        arguments: further options of `windlass serve`.
        log: file for the server's output.

    Raises:
        WindlassError: the server ended, or was not ready in five minutes.
    """

    def __init__(self, model: Path, arguments: list[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self._log = log
        command = [sys.executable, "-m", "windlass", "serve", str(model), "--port", str(port), *arguments]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            self._wait_until_ready()
        except BaseException:
            self.process.kill()
            raise

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + _START_SECONDS
        while (code := self.process.poll()) is None and time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"{self.address}/ready", timeout=5):
                    return
            except (OSError, urllib.error.HTTPError):  # not listening yet, or 503 while the model is loaded
                time.sleep(0.1)
        lines = self._log.read_text(errors="replace").splitlines()[-5:]
        problem, fix = f"is not ready after {_START_SECONDS:.0f} s", "give a smaller model"
        if code is not None:
            problem, fix = f"ended with exit code {code} before it was ready", "correct this, and start again"
        raise WindlassError(f"the server {problem}; the end of {self._log}: {' | '.join(lines)}; {fix}")

    def max_model_len(self) -> int:
        """Return the maximum number of tokens of a prompt and its answer together."""
        with urllib.request.urlopen(f"{self.address}/v1/models", timeout=30) as answer:
            return int(json.load(answer)["data"][0]["max_model_len"])

    def metrics(self) -> dict[str, float]:
        """Return the sum of each metric over its labels."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def memory(self) -> dict[str, int]:
        """Return resident bytes: all (`VmRSS`), anonymous (`RssAnon`), of mapped files (`RssFile`) and of shared memory
        (`RssShmem`)."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon", "RssFile", "RssShmem")}

    def stop(self) -> int:
        """Send SIGTERM and return the exit code. A server that still runs after a minute is killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
