"""What one rank sees of the others: records, and how long each has been silent."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from windlass.base.process import is_alive, is_stopped
from windlass.watchdog.record import End, Record
from windlass.watchdog.settings import Limits


class State(StrEnum):
    """Of a rank's process, as seen from here."""

    ALIVE = "alive"
    SILENT = "silent"  # there, but no thread of Python's comes to run
    STOPPED = "stopped"
    DEAD = "dead"
    ABSENT = "not there yet"  # it never made an engine


@dataclass(frozen=True)
class Sight:
    """A rank: its last record (None while there was none), its state, and since when it was silent, in seconds."""

    rank: int
    record: Record | None
    state: State
    silent_s: float = 0.0

    @property
    def living(self) -> bool:
        """Whether it takes part: its process runs and its program is not through."""
        return self.state is not State.DEAD and not self.ended

    @property
    def ended(self) -> bool:
        """Whether its program is through, by its own word."""
        return self.record is not None and self.record.end is not End.NO

    @property
    def waits_s(self) -> float:
        """For how long it has waited for other ranks."""
        return self.record.waits_s if self.record is not None and self.state is State.ALIVE else 0.0


class Lookout:
    """Remembers when each rank's beat was last seen to change.

    Args:
        host: of this process.
    """

    def __init__(self, world: int, host: str, limits: Limits) -> None:
        self.world, self._host, self.limits = world, host, limits
        self.known: dict[int, Record] = {}
        self._changed: dict[int, float] = {}

    def update(self, records: Mapping[int, Record]) -> None:
        """Take in what was read now."""
        for rank, record in records.items():
            before = self.known.get(rank)
            if before is None or before.beat != record.beat:
                self._changed[rank] = time.monotonic()
            self.known[rank] = record

    def skip(self, seconds: float) -> None:
        """This process could not run for so long, in which nobody was silent."""
        for rank in self._changed:
            self._changed[rank] += seconds

    def silent(self, rank: int) -> float:
        """Seconds since the rank's beat changed, as far as it was looked at."""
        return time.monotonic() - self._changed.get(rank, time.monotonic())

    def gone_here(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those of `ranks` that ran on this host and whose processes are not there any more."""
        known = [(rank, self.known[rank]) for rank in ranks if rank in self.known]
        return tuple(rank for rank, record in known if record.host == self._host and not is_alive(record.pid))

    def sights(self) -> list[Sight]:
        """Every rank, in order."""
        gone = {rank for record in self.known.values() for rank in record.gone}
        heard = {record.host for rank, record in self.known.items() if self.silent(rank) < self.limits.silent_after}
        return [self._sight(rank, gone, heard) for rank in range(self.world)]

    def sight(self, rank: int) -> Sight:
        """One rank, by its own record alone."""
        return self._sight(rank, set(), set())

    def _sight(self, rank: int, gone: set[int], heard: set[str]) -> Sight:
        record = self.known.get(rank)
        if record is None:
            return Sight(rank, None, State.ABSENT)
        silent = self.silent(rank)
        state = State.ALIVE
        if rank in gone or self.gone_here([rank]):
            state = State.DEAD
        elif silent >= self.limits.silent_after:
            state = State.SILENT
            if record.host == self._host and is_stopped(record.pid):
                state = State.STOPPED
            elif record.host != self._host and record.host not in heard and silent >= self.limits.lost_after:
                state = State.DEAD
        return Sight(rank, record, state, silent)
