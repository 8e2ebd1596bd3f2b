"""How long checkpointed calls take, forward and again in the backward; told once a backward."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from windlass.base.autograd import at_end_of_backward, current_backward
from windlass.base.device import local_device, synchronize
from windlass.base.log import logger
from windlass.observe.timers import Lap
from windlass.parallel.kept import Counts


class Profile:
    """Times of outermost calls, and what was kept for them.

    Args:
        told: log a line at the end of every backward that computed something again.
        synchronizes: wait for the device at either end of a call; telling times does so anyway.
    """

    def __init__(self, *, told: bool, synchronizes: bool) -> None:
        self._told, self._synchronizes = told, synchronizes or told
        self.laps: dict[str, Lap] = {}
        self._running = False
        self._backwards: set[int] = set()
        self._seen = 0, 0  # bytes moved and fetched when the last line was logged

    @contextmanager
    def call(self, *, again: bool, counts: Counts | None) -> Iterator[None]:
        """Around a checkpointed call, or around its recomputation (`again`)."""
        if self._running or not self._synchronizes:
            yield
            return
        self._running, start = True, self._now()
        try:
            yield
        finally:
            self._running = False
            lap = self.laps.setdefault("recomputation" if again else "forward", Lap())
            lap.count, lap.seconds = lap.count + 1, lap.seconds + self._now() - start
            self._tell_at_the_end(counts)

    def _now(self) -> float:
        synchronize(local_device())
        return time.perf_counter()

    def _tell_at_the_end(self, counts: Counts | None) -> None:
        number = current_backward()
        if not self._told or number < 0 or number in self._backwards:
            return
        self._backwards.add(number)
        at_end_of_backward(lambda: self._tell(number, counts))

    def _tell(self, number: int, counts: Counts | None) -> None:
        self._backwards.discard(number)
        laps, self.laps = self.laps, {}
        words = [f"{name} of {lap.count} calls {1000 * lap.seconds:.1f} ms" for name, lap in laps.items()]
        if counts is not None:
            moved, fetched = counts.moved - self._seen[0], counts.fetched - self._seen[1]
            self._seen = counts.moved, counts.fetched
            words.append(f"{moved / 1e6:.1f} MB moved, {fetched / 1e6:.1f} MB fetched")
        logger.info("activation checkpointing: %s", " | ".join(words))
