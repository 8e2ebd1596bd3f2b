"""Timing of checkpointed calls and of their recomputation, logged once per backward."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from windlass.base.backward_callbacks import current_backward_id, queue_end_of_backward
from windlass.base.compute_device import local_device, synchronize
from windlass.base.log import logger
from windlass.observe.phase_timers import TimerTotal
from windlass.parallel.saved_tensor_offload import OffloadCounters


class CheckpointProfiler:
    """Timer of the outermost checkpointed calls.

    Args:
        log_times: log a line at the end of every backward that recomputed a call.
        synchronize: synchronize the device before and after each call. `log_times` implies it.
    """

    def __init__(self, *, log_times: bool, synchronize: bool) -> None:
        self._log_times, self._synchronize = log_times, synchronize or log_times
        self.laps: dict[str, TimerTotal] = {}
        self._running = False
        self._backwards: set[int] = set()
        self._last_logged = 0, 0  # bytes offloaded and fetched when the last line was logged

    @contextmanager
    def call(self, *, recomputing: bool, counters: OffloadCounters | None) -> Iterator[None]:
        """Time a checkpointed call, or its recomputation if `recomputing`."""
        if self._running or not self._synchronize:
            yield
            return
        self._running, start = True, self._now()
        try:
            yield
        finally:
            self._running = False
            lap = self.laps.setdefault("recomputation" if recomputing else "forward", TimerTotal())
            lap.count, lap.seconds = lap.count + 1, lap.seconds + self._now() - start
            self._log_at_backward_end(counters)

    def _now(self) -> float:
        synchronize(local_device())
        return time.perf_counter()

    def _log_at_backward_end(self, counters: OffloadCounters | None) -> None:
        number = current_backward_id()
        if not self._log_times or number < 0 or number in self._backwards:
            return
        self._backwards.add(number)
        queue_end_of_backward(lambda: self._log(number, counters))

    def _log(self, backward_id: int, counters: OffloadCounters | None) -> None:
        self._backwards.discard(backward_id)
        laps, self.laps = self.laps, {}
        words = [f"{name} of {lap.count} calls {1000 * lap.seconds:.1f} ms" for name, lap in laps.items()]
        if counters is not None:
            moved, fetched = (
                counters.offloaded_bytes - self._last_logged[0],
                counters.fetched_bytes - self._last_logged[1],
            )
            self._last_logged = counters.offloaded_bytes, counters.fetched_bytes
            words.append(f"{moved / 1e6:.1f} MB offloaded, {fetched / 1e6:.1f} MB fetched")
        logger.info("activation checkpointing: %s", " | ".join(words))
