"""First-fit allocation of byte ranges for extents, without I/O."""

from __future__ import annotations

PAGE = 4096
"""Alignment of direct I/O in bytes. Extents consist of whole pages."""


def page_up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def page_down(nbytes: int) -> int:
    return nbytes // PAGE * PAGE


class ExtentAllocator:
    """First-fit allocator of the bytes from 0 to `end`, each of which is allocated or free.

    Attributes:
        end: end of the last allocated byte.
    """

    def __init__(self) -> None:
        self.end = 0
        # Free ranges `[first, last)`, sorted. Neighbours are joined, and no range ends at `end`.
        self._free: list[tuple[int, int]] = []

    def find_free(self, nbytes: int) -> int:
        """Return the offset at which `allocate` would place `nbytes` bytes."""
        return next((first for first, last in self._free if last - first >= nbytes), self.end)

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` bytes and return their offset."""
        for index, (first, last) in enumerate(self._free):
            if last - first >= nbytes:
                self._free[index : index + 1] = [(first + nbytes, last)] if first + nbytes < last else []
                return first
        start = self.end
        self.end += nbytes
        return start

    def free(self, start: int, nbytes: int) -> None:
        """Free a range that `allocate(nbytes)` returned. `end` decreases if no allocated byte follows the range."""
        first, last = start, start + nbytes
        joined = [span for span in self._free if span[1] == first or span[0] == last]
        for span in joined:
            self._free.remove(span)
            first, last = min(first, span[0]), max(last, span[1])
        if last == self.end:
            self.end = first
        elif first < last:
            self._free.append((first, last))
            self._free.sort()


def split_at_pages(first: int, last: int, size: int = PAGE) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Split `[first, last)` at pages of `size` bytes into partial pages at its ends and whole pages between them.

    Returns:
        The ranges of the partial pages, and the range of the whole pages, which may be empty.
    """
    up, down = -(-first // size) * size, last // size * size
    if up > down:
        return [(first, last)], (last, last)
    return [span for span in ((first, up), (down, last)) if span[0] < span[1]], (up, down)
