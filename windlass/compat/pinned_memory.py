"""Module `deepspeed.utils.pin_memory_tracker`: tracks the host memory that the accelerator has page-locked."""

from __future__ import annotations

from windlass.compat.rank_logging import logger

_FIRST_REPORT = 32 * 2**30


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes in the largest unit that gives at least 1."""
    for size, unit, digits in ((2**30, "GB", 3), (2**20, "MB", 2), (2**10, "KB", 1)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{digits}f} {unit}"
    return f"{num_bytes} B"


class PinnedMemoryTracker:
    """Tracker of all page-locked allocations of this process. Logs each time the sum passes 32 GB, 64 GB, 128 GB, ...

    Page-locked memory is never swapped out and counts against `ulimit -l`. The sum does not decrease when memory is
    freed.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the counts."""
        self._bytes = self._calls = 0
        self._next_checkpoint = _FIRST_REPORT

    def track(self, num_bytes: int) -> None:
        """Add one allocation."""
        self._bytes += num_bytes
        self._calls += 1
        while self._bytes >= self._next_checkpoint:
            passed = format_bytes(self._next_checkpoint)
            logger.info(f"pinned memory, checkpoint {passed}: {self.summary()}")
            self._next_checkpoint *= 2

    def summary(self) -> str:
        """Return the sum and the number of allocations as text."""
        return f"{format_bytes(self._bytes)} pinned in {self._calls} allocations"


tracker = PinnedMemoryTracker()


def track_pinned_memory(num_bytes: int) -> None:
    """Add one allocation to the process's sum."""
    tracker.track(num_bytes)


def pinned_memory_summary(tag: str = "") -> None:
    """Log the process's sum."""
    logger.info(f"pinned memory{f' ({tag})' if tag else ''}: {tracker.summary()}")
