"""Supervision of a run: a failed rank or a signal ends all ranks, and the result is one exit status."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Protocol

from windlass.base.log import logger
from windlass.launch.exit_status import LaunchExitStatus, RankFailure, combine_failures, signal_name
from windlass.launch.oom_kills import OomKillCounter
from windlass.launch.rank_output import RankConsole, write_stream

_FIRST_FAILURE_WINDOW_S = 0.25  # after the first failure, ranks that fail within this time count as failed too
# Signals within this time are one request: systemd sends SIGTERM and SIGHUP, a closed terminal SIGHUP and SIGTERM.
_ONE_REQUEST_S = 0.2


class SupervisedNode(Protocol):
    """Group of ranks that are supervised together: the ranks of this machine, or the ranks behind one connection."""

    @property
    def alive(self) -> bool: ...  # noqa: D102

    def poll(self) -> None: ...  # noqa: D102

    def stop(self, signal_number: int, grace_s: float) -> None: ...  # noqa: D102

    def kill(self) -> None: ...  # noqa: D102

    def close(self, *, succeeded: bool) -> None: ...  # noqa: D102


class RankEvents:
    """Events of ranks, recorded for the exit status. Subclasses also display them.

    Args:
        hosts: host of each rank; empty if messages need not name it.
        workers: ranks of parameter server workers. If a signal ends a worker, the run continues, unless signals have
            ended all workers.
    """

    def __init__(self, console: RankConsole | None, hosts: Sequence[str] = (), workers: Collection[int] = ()) -> None:
        self.console, self._hosts, self._workers = console, hosts, workers
        self.failures: list[RankFailure] = []
        self.pid_of_rank: dict[int, int] = {}
        self.status_of_rank: dict[int, int] = {}
        self.memory_of_rank: dict[int, int] = {}
        self._oom_kills = OomKillCounter()
        self._killed_after = math.inf

    def on_started(self, rank: int, pid: int) -> None:
        """Record the process id of a started rank."""
        self.pid_of_rank[rank] = pid

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        """Show output of a rank."""
        if self.console is not None:
            self.console.feed(rank, stream, data)

    def on_ended(self, rank: int, status: int) -> None:
        """Record the end of a rank. All of its output has been reported before."""
        self.status_of_rank[rank] = status
        if self.console is not None:
            self.console.flush_rank(rank)
        was_killed_by_launcher = status == -signal.SIGKILL and time.monotonic() >= self._killed_after
        if status and not was_killed_by_launcher and not self._continues_without(rank, status):
            host = self._hosts[rank] if self._hosts else ""
            memory = status == -signal.SIGKILL and not host and self._oom_kills.has_increased()
            self.failures.append(RankFailure(rank, status, time.time(), host, out_of_memory=memory))

    def _continues_without(self, rank: int, status: int) -> bool:
        is_stopping = self._killed_after < math.inf
        if rank not in self._workers or status >= 0 or is_stopping:
            return False
        if all(self.status_of_rank.get(worker, 0) < 0 for worker in self._workers):
            return False
        name = signal_name(-status)
        logger.warning("rank %d, a worker, was ended by %s: the run continues without it", rank, name)
        return True

    def on_stopping(self, grace_s: float) -> None:
        """Record that ranks are stopped. Those that are killed after `grace_s` seconds do not count as failed."""
        self._killed_after = time.monotonic() + grace_s

    def on_host_lost(self, host: str, first_rank: int, num_ranks: int, reason: str) -> None:
        """Record the loss of a host with its ranks."""
        self.status_of_rank |= dict.fromkeys(range(first_rank, first_rank + num_ranks), -signal.SIGKILL)
        self.failures.append(RankFailure(first_rank, -signal.SIGKILL, time.time(), host, num_ranks, reason))

    def on_host_output(self, host: str, stream: str, data: bytes) -> None:
        """Show lines that a program other than a rank wrote on `host`."""
        show = self.console.emit if self.console is not None else write_stream
        show(stream, b"".join(f"[{host}] ".encode() + line for line in data.splitlines(keepends=True)))

    def on_tick(self) -> None:
        """Do nothing. The supervisor calls this method at each check of the ranks; subclasses update their display."""


class ReceivedSignals:
    """Signals that this process has received since `capture_signals`, oldest first."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._times: list[float] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record a signal. This object is the signal handler."""
        self.numbers.append(number)
        self._times.append(time.monotonic())

    @property
    def is_repeated(self) -> bool:
        """True if a signal is a second request to stop: it came at least a fraction of a second after the first."""
        return bool(self._times) and self._times[-1] - self._times[0] >= _ONE_REQUEST_S


@contextlib.contextmanager
def capture_signals(names: Sequence[str]) -> Iterator[ReceivedSignals]:
    """Record these signals instead of terminating. A SIGHUP that `nohup` has set to be ignored stays ignored.

    Inside another `capture_signals` the result is the outer one, which may contain signals already.
    """
    numbers = [number for name in names if (number := getattr(signal, name, None)) is not None]
    before = {number: signal.getsignal(number) for number in numbers}
    received = next((handler for handler in before.values() if isinstance(handler, ReceivedSignals)), ReceivedSignals())
    if before.get(getattr(signal, "SIGHUP", None)) == signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, received)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def supervise(
    nodes: Sequence[SupervisedNode],
    events: RankEvents,
    selector: selectors.BaseSelector,
    received: ReceivedSignals,
    *,
    grace_s: float,
    lost_grace_s: float | None = None,
    monitor_interval_s: float = 0.1,
) -> LaunchExitStatus:
    """Supervise `nodes` until all of their ranks have ended.

    The first signal is forwarded to every rank, with `grace_s` seconds to end; a second one kills them, unless it
    follows the first at once. After the first failure the other ranks receive SIGTERM, with the same grace, or
    `lost_grace_s` if a host was lost. A signal after a failure does not change the exit code.
    """
    stopped_by, obeyed, failed_at = None, 0, 0.0

    def stop_all(signal_number: int, grace_s: float) -> None:
        events.on_stopping(grace_s)
        for node in nodes:
            node.stop(signal_number, grace_s)

    def kill_all() -> None:
        events.on_stopping(0.0)
        for node in nodes:
            node.kill()

    try:
        while any(node.alive for node in nodes):
            for key, _ in selector.select(monitor_interval_s):
                key.data()
            for node in nodes:
                node.poll()
            events.on_tick()
            if len(received.numbers) > obeyed:
                is_first, obeyed = not obeyed, len(received.numbers)
                if is_first and not events.failures:
                    stopped_by = received.numbers[0]
                if received.is_repeated:
                    kill_all()
                elif is_first:
                    stop_all(received.numbers[0], grace_s)
            elif events.failures and stopped_by is None and not obeyed:
                failed_at = failed_at or time.monotonic()
                if failed_at > 0 and time.monotonic() - failed_at >= _FIRST_FAILURE_WINDOW_S:
                    lost = any(failure.reason for failure in events.failures)
                    short = grace_s if lost_grace_s is None else min(grace_s, lost_grace_s)
                    stop_all(signal.SIGTERM, short if lost else grace_s)
                    failed_at = -1.0
    except BaseException:
        kill_all()
        raise
    finally:
        for node in nodes:
            node.close(succeeded=not events.failures and not received.numbers)
    if stopped_by is not None:
        return LaunchExitStatus(128 + stopped_by, interrupted_by=stopped_by)
    interrupted_by = received.numbers[0] if events.failures and received.numbers else None
    return replace(combine_failures(events.failures), interrupted_by=interrupted_by)


def failure_output_lines(console: RankConsole | None, status: LaunchExitStatus, world_size: int) -> list[str]:
    """Return the lines of a failure report: the rank that failed first, and its last output."""
    first = status.first_failure
    if console is None or first is None or world_size < 2 or first.reason:
        return []
    lines = console.last_lines(first.rank)
    return [f"the last lines of rank {first.rank}:", *(f"  {line}" for line in lines)] if lines else []


def resident_bytes_of(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it cannot be read."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
