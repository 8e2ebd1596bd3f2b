"""How a launch ended: one exit code out of many, in the convention of shells."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from windlass.base.process import ENDED_BY_WATCHDOG

# What a rank ends with that was asked to stop and did: by a signal, or by a handler that says so.
_STOPPED = frozenset(128 + number for number in (signal.SIGINT, signal.SIGTERM))
_SAME_MOMENT_SECONDS = 1
_UNASKED_SECONDS = 0.2  # so long after a first failure nobody has been told to stop yet


@dataclass(frozen=True)
class Failure:
    """A rank that did not end with 0. `status` is negative for a signal, `time` in seconds of the epoch.

    `host` is named where there are several. A host that was lost with all its ranks is one failure: of its first rank,
    with their number and the reason. `memory`: the kernel killed a process for want of memory in the same run.
    """

    rank: int
    status: int
    time: float
    host: str = ""
    ranks: int = 1
    why: str = ""
    memory: bool = False

    @property
    def code(self) -> int:
        """The exit code as a shell counts it: 128 plus the number of the signal that ended it."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def lost(self) -> bool:
        """Whether a signal ended it that was no wish to stop: what it ran on may be gone with it."""
        return self.status < 0 and self.code not in _STOPPED

    def __str__(self) -> str:
        if self.why:
            last = self.rank + self.ranks - 1
            ranks = f"ranks {self.rank} to {last}" if self.ranks > 1 else f"rank {last}"
            return f"{self.host} was lost with {ranks}: {self.why}"
        who = f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"
        if self.status == ENDED_BY_WATCHDOG:
            return f"{who} was ended by its watchdog, whose report says why"
        if self.status >= 0:
            return f"{who} ended with exit code {self.status}"
        return f"{who} was ended by {_signal_name(-self.status)}{self._cause()}"

    def _cause(self) -> str:
        if self.status != -signal.SIGKILL:
            return ""
        if self.memory:
            return (
                ": the kernel killed a process for want of memory (the machine's, or up to the limit of its container "
                "or cgroup); take a smaller micro-batch, activation checkpointing or offload, or raise the limit"
            )
        return " (by somebody, a scheduler, or the kernel for want of memory: `dmesg` tells)"


@dataclass(frozen=True)
class Outcome:
    """The exit code of the whole, the ranks to blame for it, and the signal that the launcher itself was sent."""

    code: int
    failures: tuple[Failure, ...] = ()
    interrupted_by: int | None = None

    @property
    def first(self) -> Failure | None:
        """Of the ranks to blame, the one that failed before the others."""
        return min(self.failures, key=lambda failure: failure.time, default=None)


def outcome_of(failures: Sequence[Failure]) -> Outcome:
    """The worst exit code of the ranks that failed by themselves.

    After a first failure the other ranks are told to stop, and killed if they do not; what they end with follows from
    it and must not hide it. So only the failures of the first moment count, and of these a rank that was stopped, or
    that its watchdog ended because of another, counts only if there is no other, and it was stopped by somebody else.
    """
    if not failures:
        return Outcome(0)
    first = min(failure.time for failure in failures)
    early = [failure for failure in failures if failure.time - first <= _SAME_MOMENT_SECONDS]
    unasked = [failure for failure in early if failure.time - first <= _UNASKED_SECONDS]
    own = [failure for failure in early if failure.code not in _STOPPED] or unasked
    own = [failure for failure in own if failure.code != ENDED_BY_WATCHDOG] or own
    return Outcome(max(failure.code for failure in own), tuple(sorted(own, key=lambda failure: failure.rank)))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
