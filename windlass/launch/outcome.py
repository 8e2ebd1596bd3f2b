"""How a launch ended: one exit code out of many, in the convention of shells."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from windlass.base.process import ENDED_BY_WATCHDOG

# What a rank ends with that was asked to stop and did: by a signal, or by a handler that says so.
_STOPPED = frozenset(128 + number for number in (signal.SIGINT, signal.SIGTERM))
_SAME_MOMENT_SECONDS = 1


@dataclass(frozen=True)
class Failure:
    """A rank that did not end with 0. `status` is negative for a signal, `time` in whole seconds of the epoch."""

    rank: int
    status: int
    time: int

    @property
    def code(self) -> int:
        """The exit code as a shell counts it: 128 plus the number of the signal that ended it."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def lost(self) -> bool:
        """Whether a signal ended it that was no wish to stop: what it ran on may be gone with it."""
        return self.status < 0 and self.code not in _STOPPED

    def __str__(self) -> str:
        if self.status == ENDED_BY_WATCHDOG:
            return f"rank {self.rank} was ended by its watchdog, whose report says why"
        if self.status >= 0:
            return f"rank {self.rank} ended with exit code {self.status}"
        return f"rank {self.rank} was ended by {_signal_name(-self.status)}"


@dataclass(frozen=True)
class Outcome:
    """The exit code of the whole, the ranks to blame for it, and the signal that the launcher itself was sent."""

    code: int
    failures: tuple[Failure, ...] = ()
    interrupted_by: int | None = None


def outcome_of(failures: Sequence[Failure]) -> Outcome:
    """The worst exit code of the ranks that failed by themselves.

    After a first failure the other ranks are told to stop, and killed if they do not; what they end with follows from
    it and must not hide it. So only the failures of the first moment count, and of these a rank that was stopped, or
    that its watchdog ended because of another, counts only if there is no other.
    """
    if not failures:
        return Outcome(0)
    first = min(failure.time for failure in failures)
    early = [failure for failure in failures if failure.time - first <= _SAME_MOMENT_SECONDS]
    own = [failure for failure in early if failure.code not in _STOPPED] or early
    own = [failure for failure in own if failure.code != ENDED_BY_WATCHDOG] or own
    return Outcome(max(failure.code for failure in own), tuple(sorted(own, key=lambda failure: failure.rank)))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
