"""Knows from the last step in which order units are wanted: what to gather early, what not to release yet."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.storage.slot import Home
from windlass.zero.unit import Presence, Unit


class Foresight:
    """The sequence of units that one forward and backward asked for, and where in it this one is.

    Args:
        ahead: elements to gather ahead of need (`stage3_prefetch_bucket_size`).
        live: elements that may be present at once (`stage3_max_live_parameters`).
        reuse: a unit wanted again within so many elements is not released (`stage3_max_reuse_distance`).
        read: elements of this rank's cuts to read from disk ahead of their gathers (`offload_param.buffer_count` times
            `buffer_size`).
    """

    IN_FLIGHT = 2  # gathers: one that is waited for and one behind it; more only take memory

    def __init__(self, ahead: int, live: int, reuse: int, read: int) -> None:
        self._ahead, self._live, self._reuse, self._read = ahead, live, reuse, read
        self._trace: list[Unit] = []
        self._last: list[Unit] = []
        self._at = 0
        self._follows = False

    def begin(self, *, complete: bool) -> None:
        """A new forward begins; `complete`: the one before had a backward, so its sequence is worth knowing."""
        if complete:
            self._last = self._trace
        self._trace, self._at = [], 0
        self._follows = bool(self._last)

    def wanted(self, unit: Unit) -> None:
        """`unit` is asked for now."""
        self._trace.append(unit)
        if not self._follows:
            return
        for at in range(self._at, len(self._last)):
            if self._last[at] is unit:
                self._at = at + 1
                return
        self._follows = False

    def next(self, present: int) -> Iterator[Unit]:
        """The units to gather now, ahead of need.

        Args:
            present: elements present or coming.
        """
        budget, flying = self._ahead, 1
        for unit in self._last[self._at :] if self._follows else ():
            if unit.presence is not Presence.RELEASED:
                continue
            budget -= unit.numel
            present += unit.numel
            flying += 1
            if budget < 0 or present > self._live or flying > self.IN_FLIGHT:
                return
            yield unit

    def to_read(self) -> Iterator[Unit]:
        """The units whose cuts to read from disk now, beyond those that are gathered."""
        budget = self._read
        for unit in self._last[self._at :] if self._follows else ():
            if unit.presence is Presence.RELEASED and unit.home is Home.NVME:
                budget -= unit.layout.padded // unit.transport.group.size
                if budget < 0:
                    return
                yield unit

    def wanted_soon(self, unit: Unit, present: int) -> bool:
        """Whether `unit` is used again so soon that it should stay."""
        if not self._follows or self._reuse <= 0 or present > self._live:
            return False
        distance = 0
        for other in self._last[self._at :]:
            if other is unit:
                return True
            distance += other.numel
            if distance > self._reuse:
                return False
        return False
