"""Where in the tier's bytes extents lie: first fit among what was given back, else at the end. Arithmetic alone."""

from __future__ import annotations

PAGE = 4096
"""Bytes on whose multiples direct I/O begins and ends; extents are made of whole ones."""


def page_up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def page_down(nbytes: int) -> int:
    return nbytes // PAGE * PAGE


class ExtentAllocator:
    """One range of bytes from 0 to `end`, in which every byte is taken or free.

    Attributes:
        end: where the last taken byte ends.
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # (first, last), sorted, neighbours joined, none at the end

    def find_free(self, nbytes: int) -> int:
        """Where `take` would put so many bytes."""
        return next((first for first, last in self._free if last - first >= nbytes), self.end)

    def allocate(self, nbytes: int) -> int:
        """Take so many bytes; returns where they begin."""
        for index, (first, last) in enumerate(self._free):
            if last - first >= nbytes:
                self._free[index : index + 1] = [(first + nbytes, last)] if first + nbytes < last else []
                return first
        start = self.end
        self.end += nbytes
        return start

    def free(self, start: int, nbytes: int) -> None:
        """Free what `take(nbytes)` returned; `end` falls if nothing follows it."""
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
    """The parts of `[first, last)` that fill no whole page, or span of another `size`, and the rest between them."""
    up, down = -(-first // size) * size, last // size * size
    if up > down:
        return [(first, last)], (last, last)
    return [span for span in ((first, up), (down, last)) if span[0] < span[1]], (up, down)
