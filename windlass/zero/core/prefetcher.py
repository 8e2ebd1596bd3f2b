"""Prefetcher: predicts from the last step the order in which units are used."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.storage.slot import Tier
from windlass.zero.core.unit import ShardState, Unit


class Prefetcher:
    """Trace of the units used by one forward and backward, and the current position in it.

    Args:
        prefetch_numel: Maximum number of elements to gather ahead of use (`stage3_prefetch_bucket_size`).
        max_live_numel: Number of unsharded elements above which no unit is prefetched or stays unsharded after its use
            (`stage3_max_live_parameters`).
        max_reuse_distance: A unit that is used again within this number of elements stays unsharded; 0: none
            (`stage3_max_reuse_distance`).
        read_ahead_numel: Maximum number of elements of this rank's shards to read from NVMe ahead of their gathers
            (`offload_param.buffer_count` times `buffer_size`).
    """

    MAX_IN_FLIGHT = 2  # the unit in use and the next one: more gathers at a time would only take memory

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
        """Begin the trace of a new forward.

        `had_backward`: the trace of the last forward includes a backward, so predict from it.
        """
        # An evaluation forward must not replace the trace of a training step.
        if had_backward:
            self._previous_trace = self._trace
        self._trace, self._position = [], 0
        self._trace_matches = bool(self._previous_trace)

    def record_use(self, unit: Unit) -> None:
        """Record that `unit` is used now, and advance in the predicted trace."""
        self._trace.append(unit)
        if not self._trace_matches:
            return
        # Skip predicted units that this rank did not use this time.
        for at in range(self._position, len(self._previous_trace)):
            if self._previous_trace[at] is unit:
                self._position = at + 1
                return
        # The order changed: predict nothing until the next forward.
        self._trace_matches = False

    def units_to_prefetch(self, live_numel: int) -> Iterator[Unit]:
        """Yield the units to gather now, ahead of use.

        Args:
            live_numel: Number of elements that are unsharded or in flight.
        """
        budget, flying = self._prefetch_numel, 1  # the unit in use counts as the first gather in flight
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
        """Yield the sharded units whose shards should be read from NVMe now, ahead of their gathers."""
        budget = self._read_ahead_numel
        for unit in self._previous_trace[self._position :] if self._trace_matches else ():
            if unit.shard_state is ShardState.SHARDED and unit.tier is Tier.NVME:
                budget -= unit.layout.padded // unit.transport.group.size
                if budget < 0:
                    return
                yield unit

    def is_reused_soon(self, unit: Unit, live_numel: int) -> bool:
        """Return True if `unit` is used again so soon that it should stay unsharded."""
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
