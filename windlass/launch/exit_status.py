"""Exit status of a launch: the exit codes of all ranks combined into one, as a shell counts them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from windlass.base.processes import WATCHDOG_EXIT_CODE

# Exit codes of a rank that ended after a request to stop: by the signal itself, or with 128 plus its number.
_STOP_CODES = frozenset(128 + number for number in (signal.SIGINT, signal.SIGTERM))
_SIMULTANEOUS_S = 1
_UNPROMPTED_S = 0.2  # within this time after the first failure, the launcher has not yet stopped any rank


@dataclass(frozen=True)
class RankFailure:
    """Rank with a nonzero exit status. `status` is negative for a signal; `failed_at` is in seconds since the epoch.

    `host` is empty if messages need not name it. A host that was lost with all its ranks is one failure: that of its
    first rank, with `num_ranks` and a `reason`. `out_of_memory`: the kernel killed a process for lack of memory during
    the run.
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
        """Exit code as a shell counts it: 128 plus the number of the signal that ended the rank."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def is_lost(self) -> bool:
        """True if a signal other than SIGINT and SIGTERM ended the rank. Its device or slot may be lost too."""
        return self.status < 0 and self.exit_code not in _STOP_CODES

    def __str__(self) -> str:
        if self.reason:
            last = self.rank + self.num_ranks - 1
            ranks = f"ranks {self.rank} to {last}" if self.num_ranks > 1 else f"rank {last}"
            return f"{self.host} was lost with {ranks}: {self.reason}"
        rank_text = f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"
        if self.status == WATCHDOG_EXIT_CODE:
            return f"{rank_text} was ended by its watchdog, whose report gives the reason"
        if self.status >= 0:
            return f"{rank_text} ended with exit code {self.status}"
        return f"{rank_text} was ended by {signal_name(-self.status)}{self._describe_cause()}"

    def _describe_cause(self) -> str:
        if self.status != -signal.SIGKILL:
            return ""
        if self.out_of_memory:
            return (
                ": the kernel killed a process for lack of memory (of the machine, or within the limit of its "
                "container or cgroup); use a smaller micro-batch, activation checkpointing or offload, or raise the "
                "limit"
            )
        return " (by a user, a scheduler, or the kernel for lack of memory: see `dmesg`)"


@dataclass(frozen=True)
class LaunchExitStatus:
    """Exit code of the launch, the ranks that caused it, and the signal that the launcher itself received, if any."""

    exit_code: int
    failures: tuple[RankFailure, ...] = ()
    interrupted_by: int | None = None

    @property
    def stopped_by(self) -> int | None:
        """The signal to the launcher that ended the run; None if a failure came first."""
        is_stopped = self.interrupted_by is not None and self.exit_code == 128 + self.interrupted_by
        return self.interrupted_by if is_stopped else None

    @property
    def first_failure(self) -> RankFailure | None:
        """The earliest of the failures; None if there are none."""
        return min(self.failures, key=lambda failure: failure.failed_at, default=None)


def combine_failures(failures: Sequence[RankFailure]) -> LaunchExitStatus:
    """Combine failures into the status of the launch: the worst exit code of the ranks that failed by themselves.

    After the first failure the launcher stops the other ranks, and kills those that do not end. Their exit codes are
    consequences and must not hide the cause. So only failures within a second of the first count. Of these, ranks with
    a stop signal's exit code, and ranks ended by their watchdog, count only if there are no others. Ranks with a stop
    signal's exit code must also have ended before the launcher can have stopped them.
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


def signal_name(number: int) -> str:
    """Return the name of a signal, or `signal NUMBER` for one without a name (real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
