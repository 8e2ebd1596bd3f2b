"""States of the other ranks, from their heartbeats and the time since each last changed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from windlass.base.processes import is_alive, is_stopped
from windlass.watchdog.heartbeat import Heartbeat, ProgramEnd
from windlass.watchdog.watchdog_limits import WatchdogLimits


class PeerState(StrEnum):
    """State of a rank's process, as another rank determines it."""

    ALIVE = "alive"
    SILENT = "silent"  # the process exists, but none of its Python threads runs
    STOPPED = "stopped"
    DEAD = "dead"
    NOT_STARTED = "not started"  # the rank has constructed no engine yet


@dataclass(frozen=True)
class PeerStatus:
    """One rank: its last heartbeat (None if it has none), its state, and the seconds since its heartbeat changed."""

    rank: int
    heartbeat: Heartbeat | None
    state: PeerState
    silent_s: float = 0.0

    @property
    def is_participating(self) -> bool:
        """True if the process runs and its program has not ended."""
        return self.state is not PeerState.DEAD and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """True if the rank has published the end of its program."""
        return self.heartbeat is not None and self.heartbeat.program_end is not ProgramEnd.RUNNING

    @property
    def wait_s(self) -> float:
        """Seconds that the rank has waited for other ranks; 0 unless its state is `ALIVE`."""
        return self.heartbeat.wait_s if self.heartbeat is not None and self.state is PeerState.ALIVE else 0.0


class PeerMonitor:
    """Heartbeats of all ranks, with the time at which each last changed.

    Args:
        world_size: number of ranks.
        host: identity of this process's host.
        limits: time limits.
    """

    def __init__(self, world_size: int, host: str, limits: WatchdogLimits) -> None:
        self.world_size, self._host, self.limits = world_size, host, limits
        self.heartbeats: dict[int, Heartbeat] = {}
        self._last_change: dict[int, float] = {}

    def update(self, heartbeats: Mapping[int, Heartbeat]) -> None:
        """Record heartbeats that were just read."""
        for rank, record in heartbeats.items():
            before = self.heartbeats.get(rank)
            if before is None or before.beat != record.beat:
                self._last_change[rank] = time.monotonic()
            self.heartbeats[rank] = record

    def ignore_pause(self, seconds: float) -> None:
        """Exclude a pause of this process from the silent times of other ranks."""
        for rank in self._last_change:
            self._last_change[rank] += seconds

    def silent_seconds(self, rank: int) -> float:
        """Return the seconds since this process first read the rank's present heartbeat; 0 if it has read none."""
        return time.monotonic() - self._last_change.get(rank, time.monotonic())

    def find_dead_local_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of `ranks` that ran on this host and whose processes are gone."""
        known = [(rank, self.heartbeats[rank]) for rank in ranks if rank in self.heartbeats]
        return tuple(rank for rank, record in known if record.host == self._host and not is_alive(record.pid))

    def peer_statuses(self) -> list[PeerStatus]:
        """Return the status of every rank, in order."""
        gone = {rank for record in self.heartbeats.values() for rank in record.dead_local_ranks}
        hosts_alive = {
            record.host
            for rank, record in self.heartbeats.items()
            if self.silent_seconds(rank) < self.limits.silent_after
        }
        return [self._make_status(rank, gone, hosts_alive) for rank in range(self.world_size)]

    def peer_status(self, rank: int) -> PeerStatus:
        """Return the status of one rank from its own heartbeat alone."""
        return self._make_status(rank, set(), set())

    def _make_status(self, rank: int, dead_ranks: set[int], live_hosts: set[str]) -> PeerStatus:
        record = self.heartbeats.get(rank)
        if record is None:
            return PeerStatus(rank, None, PeerState.NOT_STARTED)
        silent = self.silent_seconds(rank)
        state = PeerState.ALIVE
        if rank in dead_ranks or self.find_dead_local_ranks([rank]):
            state = PeerState.DEAD
        elif silent >= self.limits.silent_after:
            state = PeerState.SILENT
            if record.host == self._host and is_stopped(record.pid):
                state = PeerState.STOPPED
            elif record.host != self._host and record.host not in live_hosts and silent >= self.limits.host_lost_after:
                state = PeerState.DEAD
        return PeerStatus(rank, record, state, silent)
