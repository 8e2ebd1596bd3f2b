"""Knows from the last step in which order units are wanted: what to gather early, what not to release yet."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.storage.slot import Tier
from windlass.zero.core.unit import ShardState, Unit


class Prefetcher:
    """The sequence of units that one forward and backward asked for, and where in it this one is.

    Args:
        ahead: elements to gather ahead of need (`stage3_prefetch_bucket_size`).
        live: elements that may be present at once (`stage3_max_live_parameters`).
        reuse: a unit wanted again within so many elements is not released (`stage3_max_reuse_distance`).
        read: elements of this rank's cuts to read from disk ahead of their gathers (`offload_param.buffer_count` times
            `buffer_size`).
    """

    MAX_IN_FLIGHT = 2  # gathers: one that is waited for and one behind it; more only take memory

    def __init__(
        self, prefetch_numel: int, max_live_numel: int, max_reuse_distance: int, read_ahead_numel: int
    ) -> None:
        self._prefetch_numel, self._max_live_numel, self._max_reuse_distance, self._read_ahead_numel = (
            prefetch_numel,
            max_live_numel,
            max_reuse_distance,
            read_ahead_numel,
        )
        self._trace: list[Unit] = []
        self._previous_trace: list[Unit] = []
        self._position = 0
        self._trace_matches = False

    def begin_forward(self, *, had_backward: bool) -> None:
        """A new forward begins; `complete`: the one before had a backward, so its sequence is worth knowing."""
        if had_backward:
            self._previous_trace = self._trace
        self._trace, self._position = [], 0
        self._trace_matches = bool(self._previous_trace)

    def record_use(self, unit: Unit) -> None:
        """`unit` is asked for now."""
        self._trace.append(unit)
        if not self._trace_matches:
            return
        for at in range(self._position, len(self._previous_trace)):
            if self._previous_trace[at] is unit:
                self._position = at + 1
                return
        self._trace_matches = False

    def units_to_prefetch(self, live_numel: int) -> Iterator[Unit]:
        """The units to gather now, ahead of need.

        Args:
            present: elements present or coming.
        """
        budget, flying = self._prefetch_numel, 1
        for unit in self._previous_trace[self._position :] if self._trace_matches else ():
            if unit.shard_state is not ShardState.SHARDED:
                continue
            budget -= unit.numel
            live_numel += unit.numel
            flying += 1
            if budget < 0 or live_numel > self._max_live_numel or flying > self.MAX_IN_FLIGHT:
                return
            yield unit

    def units_to_read_ahead(self) -> Iterator[Unit]:
        """The units whose cuts to read from disk now, beyond those that are gathered."""
        budget = self._read_ahead_numel
        for unit in self._previous_trace[self._position :] if self._trace_matches else ():
            if unit.shard_state is ShardState.SHARDED and unit.tier is Tier.NVME:
                budget -= unit.layout.padded // unit.transport.group.size
                if budget < 0:
                    return
                yield unit

    def is_reused_soon(self, unit: Unit, live_numel: int) -> bool:
        """Whether `unit` is used again so soon that it should stay."""
        if not self._trace_matches or self._max_reuse_distance <= 0 or live_numel > self._max_live_numel:
            return False
        distance = 0
        for other in self._previous_trace[self._position :]:
            if other is unit:
                return True
            distance += other.numel
            if distance > self._max_reuse_distance:
                return False
        return False
