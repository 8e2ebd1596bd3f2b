"""The ranks of this machine as processes: started, listened to, told to stop, and ended."""

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

from windlass.base.processes import descendants, start_time_of
from windlass.launch import exec_rank as before_rank
from windlass.launch.launch_errors import LaunchError

OUT, ERR = "out", "err"
_PIPE_BYTES = 1 << 16
_PIPE_LINGER_S = 1.0  # so long a pipe is read on after its rank ended: a process that it left behind may hold it


class RankListener(Protocol):
    """Who is told what becomes of ranks."""

    def on_started(self, rank: int, pid: int) -> None: ...  # noqa: D102

    def on_output(self, rank: int, stream: str, data: bytes) -> None: ...  # noqa: D102

    def on_ended(self, rank: int, status: int) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class RankJob:
    """One rank to start: its number in the run, what it executes, its whole environment."""

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
    """Processes that end with this one, however it ends (Linux). Each leads a session of its own: a terminal's Ctrl-C
    reaches only the launcher, which passes it on once.

    Args:
        capture: read what ranks write and hand it to the listener; else it goes where this process's own goes.
        selector: is told of the pipes; a caller selects on it and calls what it finds there.
    """

    def __init__(
        self, jobs: Sequence[RankJob], listener: RankListener, selector: selectors.BaseSelector, *, capture: bool
    ) -> None:
        self._listener, self._selector = listener, selector
        self._processes: list[_RankProcess] = []
        self._kill_at: float | None = None
        self._stray_processes: dict[
            int, str
        ] = {}  # what ranks started outside of their group, when they were told to end
        try:
            for job in jobs:
                self._start(job, capture)
        except BaseException:
            self.close(succeeded=False)
            raise

    @property
    def alive(self) -> bool:
        """Whether a rank runs, or left something to be read."""
        return any(one.status is None or one.pipes for one in self._processes)

    @property
    def pid_of_rank(self) -> dict[int, int]:
        """Process ids of the ranks that run."""
        return {one.job.rank: one.popen.pid for one in self._processes if one.status is None}

    def poll(self) -> None:
        """Notice who ended, and kill those whose time to stop is over."""
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self.kill()
        for one in self._processes:
            if one.status is None and (status := _exit_status_of(one.popen)) is not None:
                for descriptor in list(one.pipes):  # its last words come before its end
                    self._read_pipe(one, descriptor, until_empty=True)
                one.status, one.end_time = status, time.monotonic()
                self._listener.on_ended(one.job.rank, status)
            elif one.status is not None and one.pipes and time.monotonic() - one.end_time > _PIPE_LINGER_S:
                for descriptor in list(one.pipes):
                    self._close_pipe(one, descriptor)

    def stop(self, signal_number: int, grace_s: float) -> None:
        """Send a signal to all that run, with what they started; kill what is there after `grace_s` seconds.

        What a rank started in a session of its own is not sent it, and killed when all is over.
        """
        self._record_strays()
        self._signal_groups(signal_number)
        self._kill_at = time.monotonic() + grace_s

    def kill(self) -> None:
        """End all at once, with what they started."""
        self._record_strays()
        self._signal_groups(signal.SIGKILL)
        for pid, start in self._stray_processes.items():
            if start_time_of(pid) == start:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        self._kill_at = None

    def close(self, *, succeeded: bool) -> None:
        """Let go of ranks that ended; unless all is `well`, end what they left behind. Nothing is told any more."""
        if not succeeded:
            self.kill()
        for one in self._processes:
            for descriptor in list(one.pipes):
                self._close_pipe(one, descriptor)
            one.popen.wait()
        self._processes.clear()

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

    def _record_strays(self) -> None:
        for pid in self.pid_of_rank.values() if sys.platform == "linux" else ():
            for child, start in descendants(pid).items():
                with contextlib.suppress(ProcessLookupError):
                    if os.getpgid(child) != pid:
                        self._stray_processes[child] = start

    def _signal_groups(self, signal_number: int) -> None:
        for one in self._processes:  # who ended is not waited for yet, so its number is still that of its group
            if one.status is None or signal_number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(one.popen.pid, signal_number)


def _exit_status_of(popen: subprocess.Popen[bytes]) -> int | None:
    """What a process ended with, negative for a signal; None while it runs. It is left there to be waited for."""
    if not hasattr(os, "waitid"):
        return popen.poll()
    found = os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
