"""Process of one replica: `python -m windlass.serving.replicas.replica_process`.

The process reads one line of JSON from its standard input, serves its engine on a Unix socket, and writes one line of
JSON to its standard output: `{"ready": true}` or `{"error": message}`. The end of its input means that the router has
ended, and ends the process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any

from windlass.base.errors import WindlassError
from windlass.serving.engine_loading import EngineSource
from windlass.serving.engine_server import serve_engine
from windlass.serving.server_settings import ServerSettings

_MAX_ERROR_CHARACTERS = 2**16
"""Largest number of characters of an error in an answer. The router reads an answer as one line of at most 1 MiB."""


@dataclass(frozen=True)
class ReplicaTask:
    """Engine, settings and socket of a replica."""

    source: EngineSource
    settings: dict[str, Any]
    socket_path: str

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps({"source": self.source.to_json(), "settings": self.settings, "socket_path": self.socket_path})

    @classmethod
    def from_json(cls, line: str) -> ReplicaTask:
        """Return the task that `to_json` wrote."""
        data = json.loads(line)
        return cls(EngineSource.from_json(data["source"]), data["settings"], data["socket_path"])


def main() -> int:
    """Serve until SIGTERM or a failure. Return the exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that other output to the standard output does not mix with the answers
    task = ReplicaTask.from_json(sys.stdin.readline())
    threading.Thread(target=_exit_with_router, daemon=True).start()
    settings = ServerSettings(**{**task.settings, "model_names": tuple(task.settings["model_names"])})
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(task.socket_path)
    listener.listen(1024)

    def report(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        return serve_engine(task.source, settings, listener, lambda: report(ready=True))
    except (WindlassError, OSError) as error:
        report(error=str(error)[:_MAX_ERROR_CHARACTERS])
        return error.exit_code if isinstance(error, WindlassError) else 1
    except Exception as error:
        traceback.print_exc()
        text = str(error)[:_MAX_ERROR_CHARACTERS]
        report(error=f"{type(error).__name__}: {text}; its traceback is above")
    return 1


def _exit_with_router() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
