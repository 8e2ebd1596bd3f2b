"""A run from its first rank to its last: who fails ends all, and so does a signal; what comes back is one outcome."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from windlass.launch.console import Console, write
from windlass.launch.memory_kills import MemoryKills
from windlass.launch.outcome import Failure, Outcome, outcome_of

_SETTLE_S = 0.25  # after a first failure: who fails by itself in the same moment counts too


class Node(Protocol):
    """Some ranks that are looked after together: those of this machine, or what is behind a connection."""

    @property
    def alive(self) -> bool: ...  # noqa: D102

    def poll(self) -> None: ...  # noqa: D102

    def stop(self, number: int, grace_s: float) -> None: ...  # noqa: D102

    def kill(self) -> None: ...  # noqa: D102

    def close(self, *, well: bool) -> None: ...  # noqa: D102


class Events:
    """What became of ranks, for whoever looks on: a table. This one keeps what decides the outcome.

    Args:
        hosts: the host of each rank, where there are several.
    """

    def __init__(self, console: Console | None, hosts: Sequence[str] = ()) -> None:
        self.console, self._hosts = console, hosts
        self.failures: list[Failure] = []
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        self.memory: dict[int, int] = {}
        self._kills = MemoryKills()

    def started(self, rank: int, pid: int) -> None:
        """A rank is a process now."""
        self.pids[rank] = pid

    def wrote(self, rank: int, stream: str, data: bytes) -> None:
        """A rank wrote something."""
        if self.console is not None:
            self.console.wrote(rank, stream, data)

    def ended(self, rank: int, status: int) -> None:
        """A rank ended; what it wrote was told before."""
        self.statuses[rank] = status
        if self.console is not None:
            self.console.finish(rank)
        if status:
            host = self._hosts[rank] if self._hosts else ""
            memory = status == -signal.SIGKILL and not host and self._kills.more()
            self.failures.append(Failure(rank, status, time.time(), host, memory=memory))

    def lost(self, host: str, first: int, ranks: int, why: str) -> None:
        """A host is gone with these ranks."""
        self.statuses |= dict.fromkeys(range(first, first + ranks), -signal.SIGKILL)
        self.failures.append(Failure(first, -signal.SIGKILL, time.time(), host, ranks, why))

    def said(self, host: str, stream: str, data: bytes) -> None:
        """Somebody other than a rank wrote something on `host`: whole lines."""
        show = self.console.show if self.console is not None else write
        show(stream, b"".join(f"[{host}] ".encode() + line for line in data.splitlines(keepends=True)))

    def tick(self) -> None:
        """Called many times a second."""


class Received:
    """The signals that this process was sent since it took them over, oldest first."""

    def __init__(self) -> None:
        self.numbers: list[int] = []


@contextlib.contextmanager
def signals_taken(names: Sequence[str]) -> Iterator[Received]:
    """Note these signals down instead of ending by them. A hang-up that `nohup` had ignored stays ignored."""
    received, before = Received(), {}
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


def conduct(
    nodes: Sequence[Node],
    events: Events,
    selector: selectors.BaseSelector,
    received: Received,
    *,
    grace_s: float,
    lost_grace_s: float | None = None,
    interval_s: float = 0.1,
) -> Outcome:
    """Look after `nodes` until nothing of them is left.

    The first signal is passed on to every rank, with `grace_s` seconds to end in; a second one kills. After a first
    failure the other ranks are told to stop (SIGTERM) with the same grace, `lost_grace_s` if a host was lost.
    """
    stopped_by, obeyed, failed_at = None, 0, 0.0
    try:
        while any(node.alive for node in nodes):
            for key, _ in selector.select(interval_s):
                key.data()
            for node in nodes:
                node.poll()
            events.tick()
            if len(received.numbers) > obeyed:
                obeyed = len(received.numbers)
                if obeyed == 1:
                    stopped_by = None if events.failures else received.numbers[0]
                    _stop(nodes, received.numbers[0], grace_s)
                else:
                    _kill(nodes)
            elif events.failures and stopped_by is None and not obeyed:
                failed_at = failed_at or time.monotonic()
                if failed_at > 0 and time.monotonic() - failed_at >= _SETTLE_S:
                    lost = any(failure.why for failure in events.failures)
                    short = grace_s if lost_grace_s is None else min(grace_s, lost_grace_s)
                    _stop(nodes, signal.SIGTERM, short if lost else grace_s)
                    failed_at = -1.0
    except BaseException:
        _kill(nodes)
        raise
    finally:
        for node in nodes:
            node.close(well=not events.failures and not received.numbers)
    if stopped_by is not None:
        return Outcome(128 + stopped_by, interrupted_by=stopped_by)
    return outcome_of(events.failures)


def _stop(nodes: Sequence[Node], number: int, grace_s: float) -> None:
    for node in nodes:
        node.stop(number, grace_s)


def _kill(nodes: Sequence[Node]) -> None:
    for node in nodes:
        node.kill()


def last_words(console: Console | None, outcome: Outcome, world_size: int) -> list[str]:
    """The lines that tell of a failure: which rank was first, and the last that it wrote."""
    first = outcome.first
    if console is None or first is None or world_size < 2 or first.why:
        return []
    lines = console.last_lines(first.rank)
    return [f"the last lines of rank {first.rank}:", *(f"  {line}" for line in lines)] if lines else []


def memory_of(pid: int) -> int:
    """Bytes of memory that a process has resident; 0 where that cannot be read."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
