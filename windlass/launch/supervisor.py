"""A run from its first rank to its last: who fails ends all, and so does a signal; what comes back is one outcome."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from windlass.launch.exit_status import LaunchExitStatus, RankFailure, combine_failures
from windlass.launch.oom_kills import OomKillCounter
from windlass.launch.rank_output import RankConsole, write_stream

_FIRST_FAILURE_WINDOW_S = 0.25  # after a first failure: who fails by itself in the same moment counts too


class SupervisedNode(Protocol):
    """Some ranks that are looked after together: those of this machine, or what is behind a connection."""

    @property
    def alive(self) -> bool: ...  # noqa: D102

    def poll(self) -> None: ...  # noqa: D102

    def stop(self, signal_number: int, grace_s: float) -> None: ...  # noqa: D102

    def kill(self) -> None: ...  # noqa: D102

    def close(self, *, succeeded: bool) -> None: ...  # noqa: D102


class RankEvents:
    """What became of ranks, for whoever looks on: a table. This one keeps what decides the outcome.

    Args:
        hosts: the host of each rank, where there are several.
    """

    def __init__(self, console: RankConsole | None, hosts: Sequence[str] = ()) -> None:
        self.console, self._hosts = console, hosts
        self.failures: list[RankFailure] = []
        self.pid_of_rank: dict[int, int] = {}
        self.status_of_rank: dict[int, int] = {}
        self.memory_of_rank: dict[int, int] = {}
        self._oom_kills = OomKillCounter()

    def on_started(self, rank: int, pid: int) -> None:
        """A rank is a process now."""
        self.pid_of_rank[rank] = pid

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        """A rank wrote something."""
        if self.console is not None:
            self.console.feed(rank, stream, data)

    def on_ended(self, rank: int, status: int) -> None:
        """A rank ended; what it wrote was told before."""
        self.status_of_rank[rank] = status
        if self.console is not None:
            self.console.flush_rank(rank)
        if status:
            host = self._hosts[rank] if self._hosts else ""
            memory = status == -signal.SIGKILL and not host and self._oom_kills.has_increased()
            self.failures.append(RankFailure(rank, status, time.time(), host, out_of_memory=memory))

    def on_host_lost(self, host: str, first_rank: int, num_ranks: int, reason: str) -> None:
        """A host is gone with these ranks."""
        self.status_of_rank |= dict.fromkeys(range(first_rank, first_rank + num_ranks), -signal.SIGKILL)
        self.failures.append(RankFailure(first_rank, -signal.SIGKILL, time.time(), host, num_ranks, reason))

    def on_host_output(self, host: str, stream: str, data: bytes) -> None:
        """Somebody other than a rank wrote something on `host`: whole lines."""
        show = self.console.emit if self.console is not None else write_stream
        show(stream, b"".join(f"[{host}] ".encode() + line for line in data.splitlines(keepends=True)))

    def on_tick(self) -> None:
        """Called many times a second."""


class ReceivedSignals:
    """The signals that this process was sent since it took them over, oldest first."""

    def __init__(self) -> None:
        self.numbers: list[int] = []


@contextlib.contextmanager
def capture_signals(names: Sequence[str]) -> Iterator[ReceivedSignals]:
    """Note these signals down instead of ending by them. A hang-up that `nohup` had ignored stays ignored."""
    received, before = ReceivedSignals(), {}
    for name in names:
        number = getattr(signal, name, None)
        if number is None or (name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN):
            continue
        before[number] = signal.signal(number, lambda number, frame: received.numbers.append(number))
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
    """Look after `nodes` until nothing of them is left.

    The first signal is passed on to every rank, with `grace_s` seconds to end in; a second one kills. After a first
    failure the other ranks are told to stop (SIGTERM) with the same grace, `lost_grace_s` if a host was lost.
    """
    stopped_by, obeyed, failed_at = None, 0, 0.0
    try:
        while any(node.alive for node in nodes):
            for key, _ in selector.select(monitor_interval_s):
                key.data()
            for node in nodes:
                node.poll()
            events.on_tick()
            if len(received.numbers) > obeyed:
                obeyed = len(received.numbers)
                if obeyed == 1:
                    stopped_by = None if events.failures else received.numbers[0]
                    _stop_all(nodes, received.numbers[0], grace_s)
                else:
                    _kill_all(nodes)
            elif events.failures and stopped_by is None and not obeyed:
                failed_at = failed_at or time.monotonic()
                if failed_at > 0 and time.monotonic() - failed_at >= _FIRST_FAILURE_WINDOW_S:
                    lost = any(failure.reason for failure in events.failures)
                    short = grace_s if lost_grace_s is None else min(grace_s, lost_grace_s)
                    _stop_all(nodes, signal.SIGTERM, short if lost else grace_s)
                    failed_at = -1.0
    except BaseException:
        _kill_all(nodes)
        raise
    finally:
        for node in nodes:
            node.close(succeeded=not events.failures and not received.numbers)
    if stopped_by is not None:
        return LaunchExitStatus(128 + stopped_by, interrupted_by=stopped_by)
    return combine_failures(events.failures)


def _stop_all(nodes: Sequence[SupervisedNode], signal_number: int, grace_s: float) -> None:
    for node in nodes:
        node.stop(signal_number, grace_s)


def _kill_all(nodes: Sequence[SupervisedNode]) -> None:
    for node in nodes:
        node.kill()


def failure_output_lines(console: RankConsole | None, status: LaunchExitStatus, world_size: int) -> list[str]:
    """The lines that tell of a failure: which rank was first, and the last that it wrote."""
    first = status.first_failure
    if console is None or first is None or world_size < 2 or first.reason:
        return []
    lines = console.last_lines(first.rank)
    return [f"the last lines of rank {first.rank}:", *(f"  {line}" for line in lines)] if lines else []


def resident_bytes_of(pid: int) -> int:
    """Bytes of memory that a process has resident; 0 where that cannot be read."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
