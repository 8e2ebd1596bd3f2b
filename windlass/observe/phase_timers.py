"""Named timers for `wall_clock_breakdown`, which measure the phases of a step on host and device together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from windlass.base.compute_device import synchronized_time
from windlass.base.errors import WindlassError


@dataclass
class TimerTotal:
    """Number of runs of a timer and their total time."""

    count: int = 0
    seconds: float = 0.0


class Timers:
    """Group of named timers: `with timers("forward"): ...`, or `start(name)` and `stop(name)`.

    Different timers may overlap and nest. Synchronization prevents overlap of host and device, so a group that is not
    `enabled` neither synchronizes nor measures.

    Args:
        device: device that every start and stop synchronizes.
    """

    def __init__(self, device: torch.device | str = "cpu", enabled: bool = True) -> None:
        self.device = torch.device(device)
        self.enabled = enabled
        self.totals: dict[str, TimerTotal] = {}
        self._started: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block. The time counts even if the block raises."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def start(self, name: str) -> None:
        """Start a timer.

        Raises:
            WindlassError: the timer is already running.
        """
        if not self.enabled:
            return
        if name in self._started:
            raise WindlassError(f"timer {name!r} is started twice; stop it first")
        self._started[name] = synchronized_time(self.device)

    def stop(self, name: str) -> None:
        """Stop a timer and add its time to its total.

        Raises:
            WindlassError: the timer is not running.
        """
        if not self.enabled:
            return
        if name not in self._started:
            raise WindlassError(
                f"timer {name!r} is stopped but was not started; running: {sorted(self._started) or 'none'}"
            )
        lap = self.totals.setdefault(name, TimerTotal())
        lap.seconds += synchronized_time(self.device) - self._started.pop(name)
        lap.count += 1

    def take_totals(self) -> dict[str, TimerTotal]:
        """Return and clear the totals since the last call, in order of the first stops. Running timers continue."""
        laps, self.totals = self.totals, {}
        return laps

    def summary(self, steps: int = 1) -> str:
        """Return and clear the totals as one line in ms per step, `forward 12.3 ms | backward 24.6 ms`; empty if
        nothing ran.
        """
        return " | ".join(f"{name} {1000 * lap.seconds / steps:.1f} ms" for name, lap in self.take_totals().items())
