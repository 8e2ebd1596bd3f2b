"""Time limits of the watchdog."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WatchdogLimits:
    """Time limits in seconds.

    The shorter limits are derived from `report_after`, so that a diagnosis is ready before a report is due.

    Attributes:
        report_after: time that a wait lasts before it is reported.
        timeout: time that a wait lasts before the run is ended.
    """

    report_after: float = 30.0
    timeout: float = 600.0

    @property
    def beat_interval(self) -> float:
        """Time between two heartbeats."""
        return min(1.0, self.report_after / 10)

    @property
    def check_peers_after(self) -> float:
        """Length of a wait after which ranks read each other's heartbeats."""
        return min(5.0, self.report_after / 6)

    @property
    def deadlock_after(self) -> float:
        """Time after which waits of all ranks, not all in the same operation, prove a deadlock."""
        return min(15.0, self.report_after / 2)

    @property
    def silent_after(self) -> float:
        """Time without a heartbeat after which a rank's process is examined on its host."""
        return max(4 * self.beat_interval, 1.0)

    @property
    def host_lost_after(self) -> float:
        """Time without a heartbeat from any rank of a host after which the host counts as lost."""
        return max(20.0, self.silent_after) if self.report_after >= 30 else max(self.report_after, self.silent_after)
