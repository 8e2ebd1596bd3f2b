"""Start, watch and restart of one replica's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from windlass.base.log import logger
from windlass.base.shared_weights_file import shared_descriptors
from windlass.base.text import escape_unprintable
from windlass.launch.source_path import source_pythonpath
from windlass.serving.process_exit import WorkerExitError, describe_exit
from windlass.serving.replicas.prefix_index import ReplicaLoad
from windlass.serving.replicas.replica_process import ReplicaTask

_STOP_SECONDS = 5.0
_MAX_FAILED_STARTS = 5
_LONGEST_PAUSE = 30.0
_LONG_SERVICE = 30.0
_MAX_ANSWER_BYTES = 2**20


class RestartPolicy:
    """Pauses before the restarts of a process.

    A process that has served is always started again, at once if it served long, and after growing pauses if it ends
    soon each time. Only starts that fail in a row are limited: a process that cannot start would never serve.
    """

    def __init__(self) -> None:
        self.failed_starts = 0
        self._short_services = 0

    def pause_after(self, served: float | None) -> float | None:
        """Return the seconds to wait before the next start; None: do not start again.

        Args:
            served: seconds for which the process served; None: the process ended before it served.
        """
        if served is None:
            self.failed_starts += 1
        else:
            self.failed_starts = 0
            if served >= _LONG_SERVICE:
                self._short_services = 0
        if self.failed_starts >= _MAX_FAILED_STARTS:
            return None
        short = self.failed_starts + self._short_services
        if served is not None:
            self._short_services += 1
        return min(_LONGEST_PAUSE, 0.5 * 2.0**short) if short else 0.0


class ReplicaStartError(WorkerExitError):
    """Error for a replica's process that ended before it served. The message has the error of the process."""


class ReplicaSupervisor:
    """Process of one replica, which is restarted whenever it ends.

    Attributes:
        load: requests in progress, and the prefixes that the replica has computed.
        is_ready: True while the replica serves requests.
        has_given_up: True after several consecutive failed starts: the replica is not started again.
        restarts: number of restarts.
    """

    def __init__(self, index: int, task: ReplicaTask, environment: dict[str, str], on_end: Callable[[], None]) -> None:
        self.index = index
        self.socket_path = task.socket_path
        self.load = ReplicaLoad()
        self.is_ready = False
        self.has_given_up = False
        self.restarts = 0
        self._task = task
        self._environment = environment
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._forwarding: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None before the start."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and wait until it serves; then watch it.

        Raises:
            ReplicaStartError: the process ended before it served.
        """
        await self._start_once()
        self._watching = asyncio.ensure_future(self._watch())

    async def _start_once(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket_path)
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "windlass.serving.replicas.replica_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**self._environment, "PYTHONPATH": source_pythonpath(self._environment.get("PYTHONPATH", ""))},
            pass_fds=shared_descriptors(self._environment),
            start_new_session=True,  # Ctrl-C reaches only the router, which drains
            limit=_MAX_ANSWER_BYTES,
        )
        assert process.stdin is not None and process.stdout is not None
        self._forwarding = asyncio.ensure_future(self._forward_log(process))
        with contextlib.suppress(ConnectionError):  # the process ended already, so it sends no answer
            process.stdin.write(self._task.to_json().encode() + b"\n")
            await process.stdin.drain()
        try:
            answer = await _read_answer(process.stdout)
        except ValueError as error:
            send_signal(process, signal.SIGKILL)
            while await process.stdout.read(2**16):  # `process.wait` waits for the end of this pipe too
                pass
            await process.wait()
            await self._forwarding
            raise ReplicaStartError(f"the answer of replica {self.index} cannot be read: {error}", 1) from error
        if answer.get("ready"):
            self.is_ready = True
            return
        reason = answer.get("error")
        code = await process.wait()
        await self._forwarding
        raise ReplicaStartError(reason or f"replica {self.index} ended at its start {describe_exit(code)}", code)

    async def _watch(self) -> None:
        assert self._process is not None
        policy = RestartPolicy()
        served: float | None = None
        while True:
            if self.is_ready:
                began = time.monotonic()
                code = await self._process.wait()
                served = time.monotonic() - began
                logger.error("replica %d ended %s; its requests failed", self.index, describe_exit(code))
            self.is_ready = False
            self.load.clear()
            pause = policy.pause_after(served)
            served = None
            if pause is None:
                logger.error("replica %d is not started again after %d failed starts", self.index, policy.failed_starts)
                self.has_given_up = True
                self._on_end()
                return
            await asyncio.sleep(pause)
            self.restarts += 1
            try:
                await self._start_once()
            except Exception as error:  # an error that ended this task would not be logged
                # log no traceback for a ReplicaStartError (has the process's error) or an OSError (no process started)
                cause = None if isinstance(error, ReplicaStartError | OSError) else error
                logger.error("replica %d could not be started again: %s", self.index, error, exc_info=cause)
                send_signal(self._process, signal.SIGKILL)  # an unexpected error may leave the process running
                continue
            logger.info("replica %d serves again", self.index)

    async def _forward_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while piece := await process.stderr.read(2**16):
            lines = [
                f"[replica {self.index}] {escape_unprintable(line)}\n"
                for line in piece.decode("utf-8", "replace").splitlines()
            ]
            # Errors, e.g. because the reader of stderr has closed it, do not end this loop: the process would block on
            # a full pipe.
            with contextlib.suppress(OSError):
                sys.stderr.write("".join(lines))
                sys.stderr.flush()

    def kill(self) -> None:
        """End the process at once."""
        if self._watching is not None:
            self._watching.cancel()
        if self._process is not None:
            send_signal(self._process, signal.SIGKILL)

    async def stop(self) -> None:
        """End the process by SIGTERM, after 5 seconds by SIGKILL."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})  # the task may be starting another process
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            send_signal(process, signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except TimeoutError:
                send_signal(process, signal.SIGKILL)
                await process.wait()
        if self._forwarding is not None:
            await self._forwarding


async def _read_answer(stdout: asyncio.StreamReader) -> dict[str, Any]:
    """Return the JSON line that a started process writes; empty if the process ended before the end of the line.

    Raises:
        ValueError: the line is not JSON, or has more than `_MAX_ANSWER_BYTES`.
    """
    line = await stdout.readline()
    answer: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
    return answer


def send_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal, unless the process has ended.

    `process.send_signal` would collect the exit status of a process that has just ended. asyncio waits for this status
    too, and would then report 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
