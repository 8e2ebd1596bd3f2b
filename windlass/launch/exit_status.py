"""How a launch ended: one exit code out of many, in the convention of shells."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from windlass.base.processes import WATCHDOG_EXIT_CODE

# What a rank ends with that was asked to stop and did: by a signal, or by a handler that says so.
_STOP_CODES = frozenset(128 + number for number in (signal.SIGINT, signal.SIGTERM))
_SIMULTANEOUS_S = 1
_UNPROMPTED_S = 0.2  # so long after a first failure nobody has been told to stop yet


@dataclass(frozen=True)
class RankFailure:
    """A rank that did not end with 0. `status` is negative for a signal, `time` in seconds of the epoch.

    `host` is named where there are several. A host that was lost with all its ranks is one failure: of its first rank,
    with their number and the reason. `memory`: the kernel killed a process for want of memory in the same run.
    """

    rank: int
    status: int
    failed_at: float
    host: str = ""
    num_ranks: int = 1
    reason: str = ""
    out_of_memory: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code as a shell counts it: 128 plus the number of the signal that ended it."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def is_lost(self) -> bool:
        """Whether a signal ended it that was no wish to stop: what it ran on may be gone with it."""
        return self.status < 0 and self.exit_code not in _STOP_CODES

    def __str__(self) -> str:
        if self.reason:
            last = self.rank + self.num_ranks - 1
            ranks = f"ranks {self.rank} to {last}" if self.num_ranks > 1 else f"rank {last}"
            return f"{self.host} was lost with {ranks}: {self.reason}"
        who = f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"
        if self.status == WATCHDOG_EXIT_CODE:
            return f"{who} was ended by its watchdog, whose report says why"
        if self.status >= 0:
            return f"{who} ended with exit code {self.status}"
        return f"{who} was ended by {_signal_name(-self.status)}{self._describe_cause()}"

    def _describe_cause(self) -> str:
        if self.status != -signal.SIGKILL:
            return ""
        if self.out_of_memory:
            return (
                ": the kernel killed a process for want of memory (the machine's, or up to the limit of its container "
                "or cgroup); take a smaller micro-batch, activation checkpointing or offload, or raise the limit"
            )
        return " (by somebody, a scheduler, or the kernel for want of memory: `dmesg` tells)"


@dataclass(frozen=True)
class LaunchExitStatus:
    """The exit code of the whole, the ranks to blame for it, and the signal that the launcher itself was sent."""

    exit_code: int
    failures: tuple[RankFailure, ...] = ()
    interrupted_by: int | None = None

    @property
    def first_failure(self) -> RankFailure | None:
        """Of the ranks to blame, the one that failed before the others."""
        return min(self.failures, key=lambda failure: failure.failed_at, default=None)


def combine_failures(failures: Sequence[RankFailure]) -> LaunchExitStatus:
    """The worst exit code of the ranks that failed by themselves.

    After a first failure the other ranks are told to stop, and killed if they do not; what they end with follows from
    it and must not hide it. So only the failures of the first moment count, and of these a rank that was stopped, or
    that its watchdog ended because of another, counts only if there is no other, and it was stopped by somebody else.
    """
    if not failures:
        return LaunchExitStatus(0)
    first = min(failure.failed_at for failure in failures)
    early = [failure for failure in failures if failure.failed_at - first <= _SIMULTANEOUS_S]
    unasked = [failure for failure in early if failure.failed_at - first <= _UNPROMPTED_S]
    own = [failure for failure in early if failure.exit_code not in _STOP_CODES] or unasked
    own = [failure for failure in own if failure.exit_code != WATCHDOG_EXIT_CODE] or own
    return LaunchExitStatus(
        max(failure.exit_code for failure in own), tuple(sorted(own, key=lambda failure: failure.rank))
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
