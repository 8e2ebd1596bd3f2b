"""Ranks of this machine as processes: start, output, signals, and end."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from windlass.base.log import logger
from windlass.base.processes import descendants, start_time_of
from windlass.launch import exec_rank as before_rank
from windlass.launch.exit_status import signal_name
from windlass.launch.launch_errors import LaunchError

OUT, ERR = "out", "err"
_PIPE_BYTES = 1 << 16
# a pipe is read this long after its rank ended, because processes that the rank started may still hold it
_PIPE_LINGER_S = 1.0
_SERVER_RESTARTS = 3  # limit for each parameter server


class RankListener(Protocol):
    """Receiver of events of ranks."""

    def on_started(self, rank: int, pid: int) -> None: ...  # noqa: D102

    def on_output(self, rank: int, stream: str, data: bytes) -> None: ...  # noqa: D102

    def on_ended(self, rank: int, status: int) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class RankJob:
    """Rank to start: its number in the run, its command, its full environment."""

    rank: int
    argv: list[str]
    env: dict[str, str]


@dataclass
class _RankProcess:
    job: RankJob
    popen: subprocess.Popen[bytes]
    status: int | None = None
    end_time: float = 0.0
    pipes: dict[int, str] = field(default_factory=dict)  # file descriptor -> stream


class RankProcesses:
    """Processes of ranks. They end with this process, however it ends (Linux). Each leads a session of its own, so that
    a terminal's Ctrl-C reaches only the launcher, which forwards it once.

    Args:
        capture: read the output of ranks and pass it to the listener; else it goes to this process's own output.
        selector: pipes are registered here. The caller selects on it and calls the callbacks of ready pipes.
        servers: number of parameter servers with their replicas, which are the first ranks. A server that a signal ends
            is started again, at most three times.
    """

    def __init__(
        self,
        jobs: Sequence[RankJob],
        listener: RankListener,
        selector: selectors.BaseSelector,
        *,
        capture: bool,
        servers: int = 0,
    ) -> None:
        self._listener, self._selector = listener, selector
        self._servers, self._capture, self._is_stopping = servers, capture, False
        self._server_restarts: dict[int, int] = {}
        self._processes: list[_RankProcess] = []
        self._kill_at: float | None = None
        # processes that ranks started: pid -> start time, recorded when ranks are stopped
        self._descendants: dict[int, str] = {}
        try:
            for job in jobs:
                self._start(job, capture)
        except BaseException:
            self.close(succeeded=False)
            raise

    @property
    def alive(self) -> bool:
        """Return True if a rank runs, or has unread output."""
        return any(one.status is None or one.pipes for one in self._processes)

    @property
    def pid_of_rank(self) -> dict[int, int]:
        """Process ids of the running ranks."""
        return {one.job.rank: one.popen.pid for one in self._processes if one.status is None}

    def poll(self) -> None:
        """Detect ranks that ended, and kill the others if the grace period is over."""
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self.kill()
        for one in list(self._processes):
            if one.status is None and (status := _exit_status_of(one.popen)) is not None:
                for descriptor in list(one.pipes):  # report the last output before the end of the rank
                    self._read_pipe(one, descriptor, until_empty=True)
                one.status, one.end_time = status, time.monotonic()
                if not self._is_restarted(one.job, status):
                    self._listener.on_ended(one.job.rank, status)
            elif one.status is not None and one.pipes and time.monotonic() - one.end_time > _PIPE_LINGER_S:
                for descriptor in list(one.pipes):
                    self._close_pipe(one, descriptor)

    def stop(self, signal_number: int, grace_s: float) -> None:
        """Send a signal to all running ranks and their process groups. After `grace_s` seconds `poll` kills survivors.

        Processes that a rank started in other process groups do not receive the signal, but are killed at the end.
        """
        self._is_stopping = True
        self._record_descendants()
        self._signal_groups(signal_number)
        self._kill_at = time.monotonic() + grace_s

    def kill(self) -> None:
        """Kill all ranks and the processes that they started."""
        self._is_stopping = True
        self._record_descendants()
        self._signal_groups(signal.SIGKILL)
        for pid, start in self._descendants.items():
            if start_time_of(pid) == start:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        self._kill_at = None

    def close(self, *, succeeded: bool) -> None:
        """Release ended ranks; unless `succeeded`, kill all first. The listener receives no further events."""
        if not succeeded:
            self.kill()
        for one in self._processes:
            for descriptor in list(one.pipes):
                self._close_pipe(one, descriptor)
            one.popen.wait()
        self._processes.clear()

    def _is_restarted(self, job: RankJob, status: int) -> bool:
        """Restart a parameter server that a signal ended, and return True. Otherwise return False."""
        count = self._server_restarts.get(job.rank, 0) + 1
        if job.rank >= self._servers or status >= 0 or self._is_stopping or count > _SERVER_RESTARTS:
            return False
        self._server_restarts[job.rank] = count
        name = signal_name(-status)
        logger.warning("rank %d, a parameter server, was ended by %s: it is started again", job.rank, name)
        self._start(job, self._capture)
        return True

    def _start(self, job: RankJob, capture: bool) -> None:
        command = job.argv
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", before_rank.__file__, str(os.getpid()), *command]
        pipe = subprocess.PIPE if capture else None
        try:
            popen = subprocess.Popen(
                command,
                env=job.env,
                stdin=subprocess.DEVNULL if capture else None,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
                bufsize=0,
            )
        except (OSError, ValueError) as error:
            raise LaunchError(f"rank {job.rank} cannot be started: {command[0]}: {error}") from error
        one = _RankProcess(job, popen)
        self._processes.append(one)
        for stream, name in ((popen.stdout, OUT), (popen.stderr, ERR)):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                one.pipes[stream.fileno()] = name
                on_bytes = functools.partial(self._read_pipe, one, stream.fileno())
                self._selector.register(stream.fileno(), selectors.EVENT_READ, on_bytes)
        self._listener.on_started(job.rank, popen.pid)

    def _read_pipe(self, process: _RankProcess, descriptor: int, until_empty: bool = False) -> None:
        while descriptor in process.pipes:
            try:
                data = os.read(descriptor, _PIPE_BYTES)
            except BlockingIOError:
                return
            if data:
                self._listener.on_output(process.job.rank, process.pipes[descriptor], data)
            else:
                self._close_pipe(process, descriptor)
            if not until_empty:
                return

    def _close_pipe(self, process: _RankProcess, descriptor: int) -> None:
        del process.pipes[descriptor]
        self._selector.unregister(descriptor)
        for stream in (process.popen.stdout, process.popen.stderr):
            if stream is not None and not stream.closed and stream.fileno() == descriptor:
                stream.close()

    def _record_descendants(self) -> None:
        """Record the processes that ranks started: a process may leave the rank's group later, and outlive the rank."""
        for pid in self.pid_of_rank.values() if sys.platform == "linux" else ():
            self._descendants |= descendants(pid)

    def _signal_groups(self, signal_number: int) -> None:
        for one in self._processes:  # an ended rank is not reaped yet, so its pid is still that of its process group
            if one.status is None or signal_number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(one.popen.pid, signal_number)


def _exit_status_of(popen: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status of a process, negative for a signal; None while it runs. The process is not reaped."""
    if not hasattr(os, "waitid"):
        return popen.poll()
    found = os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
