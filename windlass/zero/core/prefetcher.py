"""Predictor of the order of units, from the previous step: units to prefetch, and units to keep unsharded."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.storage.slot import Tier
from windlass.zero.core.unit import ShardState, Unit


class Prefetcher:
    """Sequence of units that the last forward and backward used, and the current position in it.

    Args:
        prefetch_numel: elements to all-gather ahead of use (`stage3_prefetch_bucket_size`).
        max_live_numel: elements that may be unsharded at once (`stage3_max_live_parameters`).
        max_reuse_distance: a unit used again within this many elements is not resharded
            (`stage3_max_reuse_distance`).
        read_ahead_numel: elements of this rank's shards to read from disk ahead of their all-gathers
            (`offload_param.buffer_count` times `buffer_size`).
    """

    MAX_IN_FLIGHT = 2  # all-gathers in flight: the current one and the next; more would only use memory

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
        """Begin a new forward. `had_backward`: the previous forward had a backward, so its sequence becomes the
        prediction.
        """
        if had_backward:
            self._previous_trace = self._trace
        self._trace, self._position = [], 0
        self._trace_matches = bool(self._previous_trace)

    def record_use(self, unit: Unit) -> None:
        """Record that `unit` is used now, and advance the position in the predicted sequence."""
        self._trace.append(unit)
        if not self._trace_matches:
            return
        for at in range(self._position, len(self._previous_trace)):
            if self._previous_trace[at] is unit:
                self._position = at + 1
                return
        self._trace_matches = False

    def units_to_prefetch(self, live_numel: int) -> Iterator[Unit]:
        """Yield the units to all-gather now, ahead of use.

        Args:
            live_numel: elements that are unsharded or in flight.
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
        """Yield the units whose shards to read from disk now, beyond the units that are prefetched."""
        budget = self._read_ahead_numel
        for unit in self._previous_trace[self._position :] if self._trace_matches else ():
            if unit.shard_state is ShardState.SHARDED and unit.tier is Tier.NVME:
                budget -= unit.layout.padded // unit.transport.group.size
                if budget < 0:
                    return
                yield unit

    def is_reused_soon(self, unit: Unit, live_numel: int) -> bool:
        """Return True if `unit` is used again within the reuse distance, so that it stays unsharded."""
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
