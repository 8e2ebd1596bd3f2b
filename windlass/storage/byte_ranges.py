"""Set of byte positions, stored as sorted ranges that do not touch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class ByteRanges:
    """Set of the written bytes of an extent. All ranges are half open: `[first, last)`."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def add(self, first: int, last: int) -> None:
        """Add the positions `[first, last)`."""
        if first >= last:
            return
        low = bisect_left(self._lasts, first)  # the first range that overlaps or touches the new one
        high = bisect_right(self._firsts, last)
        if low < high:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._firsts[low:high], self._lasts[low:high] = [first], [last]

    def remove(self, first: int, last: int) -> None:
        """Remove the positions `[first, last)`."""
        low, high = self._overlapping(first, last)
        if low >= high:
            return
        ends = [(self._firsts[low], first), (last, self._lasts[high - 1])]
        kept = [(start, end) for start, end in ends if start < end]
        self._firsts[low:high], self._lasts[low:high] = [k[0] for k in kept], [k[1] for k in kept]

    def covers(self, first: int, last: int) -> bool:
        """Return True if every position of `[first, last)` is in the set."""
        return first >= last or self.first_gap(first, last) is None

    def first_gap(self, first: int, last: int) -> tuple[int, int] | None:
        """Return the first range within `[first, last)` that is not in the set, or None."""
        low, high = self._overlapping(first, last)
        if low < high and self._firsts[low] <= first:
            first = self._lasts[low]
            low += 1
        if first >= last:
            return None
        return first, self._firsts[low] if low < high else last

    def overlaps(self, first: int, last: int) -> bool:
        """Return True if any position of `[first, last)` is in the set."""
        low, high = self._overlapping(first, last)
        return low < high

    def _overlapping(self, first: int, last: int) -> tuple[int, int]:
        if first >= last:
            return 0, 0
        return bisect_right(self._lasts, first), bisect_left(self._firsts, last)
