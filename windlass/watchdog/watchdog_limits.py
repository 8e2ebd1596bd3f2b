"""How long is too long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WatchdogLimits:
    """Seconds; the shorter ones follow from `report_after` so that a proof is whole well before that.

    Attributes:
        report_after: a wait of so long is reported.
        timeout: one of so long ends the run.
    """

    report_after: float = 30.0
    timeout: float = 600.0

    @property
    def beat_interval(self) -> float:
        """Between two beats."""
        return min(1.0, self.report_after / 10)

    @property
    def check_peers_after(self) -> float:
        """A wait of so long makes ranks look at each other."""
        return min(5.0, self.report_after / 6)

    @property
    def deadlock_after(self) -> float:
        """All ranks in waits of so long, and in different ones, will never meet."""
        return min(15.0, self.report_after / 2)

    @property
    def silent_after(self) -> float:
        """A rank without a beat for so long is looked for among the processes of its host."""
        return max(4 * self.beat_interval, 1.0)

    @property
    def host_lost_after(self) -> float:
        """A host without a beat of any rank for so long, from the first look at it on, is gone."""
        return max(20.0, self.silent_after) if self.report_after >= 30 else max(self.report_after, self.silent_after)
