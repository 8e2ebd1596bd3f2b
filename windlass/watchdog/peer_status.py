"""What one rank sees of the others: records, and how long each has been silent."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from windlass.base.processes import is_alive, is_stopped
from windlass.watchdog.heartbeat import Heartbeat, ProgramEnd
from windlass.watchdog.watchdog_limits import WatchdogLimits


class PeerState(StrEnum):
    """Of a rank's process, as seen from here."""

    ALIVE = "alive"
    SILENT = "silent"  # there, but no thread of Python's comes to run
    STOPPED = "stopped"
    DEAD = "dead"
    NOT_STARTED = "not there yet"  # it never made an engine


@dataclass(frozen=True)
class PeerStatus:
    """A rank: its last record (None while there was none), its state, and since when it was silent, in seconds."""

    rank: int
    heartbeat: Heartbeat | None
    state: PeerState
    silent_s: float = 0.0

    @property
    def is_participating(self) -> bool:
        """Whether it takes part: its process runs and its program is not through."""
        return self.state is not PeerState.DEAD and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether its program is through, by its own word."""
        return self.heartbeat is not None and self.heartbeat.program_end is not ProgramEnd.RUNNING

    @property
    def wait_s(self) -> float:
        """For how long it has waited for other ranks."""
        return self.heartbeat.wait_s if self.heartbeat is not None and self.state is PeerState.ALIVE else 0.0


class PeerMonitor:
    """Remembers when each rank's beat was last seen to change.

    Args:
        host: of this process.
    """

    def __init__(self, world_size: int, host: str, limits: WatchdogLimits) -> None:
        self.world_size, self._host, self.limits = world_size, host, limits
        self.heartbeats: dict[int, Heartbeat] = {}
        self._last_change: dict[int, float] = {}

    def update(self, heartbeats: Mapping[int, Heartbeat]) -> None:
        """Take in what was read now."""
        for rank, record in heartbeats.items():
            before = self.heartbeats.get(rank)
            if before is None or before.beat != record.beat:
                self._last_change[rank] = time.monotonic()
            self.heartbeats[rank] = record

    def ignore_pause(self, seconds: float) -> None:
        """This process could not run for so long, in which nobody was silent."""
        for rank in self._last_change:
            self._last_change[rank] += seconds

    def silent_seconds(self, rank: int) -> float:
        """Seconds since the rank's beat changed, as far as it was looked at."""
        return time.monotonic() - self._last_change.get(rank, time.monotonic())

    def find_dead_local_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those of `ranks` that ran on this host and whose processes are not there any more."""
        known = [(rank, self.heartbeats[rank]) for rank in ranks if rank in self.heartbeats]
        return tuple(rank for rank, record in known if record.host == self._host and not is_alive(record.pid))

    def peer_statuses(self) -> list[PeerStatus]:
        """Every rank, in order."""
        gone = {rank for record in self.heartbeats.values() for rank in record.dead_local_ranks}
        heard = {
            record.host
            for rank, record in self.heartbeats.items()
            if self.silent_seconds(rank) < self.limits.silent_after
        }
        return [self._make_status(rank, gone, heard) for rank in range(self.world_size)]

    def peer_status(self, rank: int) -> PeerStatus:
        """One rank, by its own record alone."""
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
