"""Model of glibc's malloc: growth of its heap while blocks of memory are allocated and freed.

[Note: fragmentation of the heap] Torch requests memory at multiples of 64 bytes. glibc (before 2.38) then searches for
a hole with 96 bytes more than a block needs, and frees the remainders before and behind the block. Small objects, such
as nodes of autograd, take these remainders, so the hole that a freed block leaves is too small for the next block of
the same size: the next block takes a larger hole, or the heap grows. A remainder is free again when its small object is
freed; in this model, at the end of the forward or backward of a module, or once 64 later remainders are taken. A module
with a loop over the tokens allocates far more blocks than others. The small objects of one round take the place of
those of the round before, so in a module with more than 256 blocks only 16 remainders are taken at once. Even then the
remainders that were freed last are not merged into holes: malloc caches seven of each size for small objects. These
rules were fitted to measured heaps (`bench/plan.py`) and differ from malloc's in detail.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

_GRAIN = 16  # bytes: chunks are multiples of this
_HEADER = 8
_SMALLEST = 32
_REMAINDER = 96  # extra bytes of the hole that glibc searches for: the alignment (64) and the smallest chunk
_TAKEN = 64  # most remainders that small objects of a module occupy at once
_LOOP = 256  # blocks of a module, above which it runs a loop
_TAKEN_IN_LOOP = 16  # most remainders that small objects occupy at once then
_CACHED = 21  # remainders that malloc caches for small objects: seven of each of three sizes

BLOCK_ENDED = (0, 0)
"""Entry of a log of allocations: the forward or backward of a module has ended."""


class HeapModel:
    """Model of a heap that returns no memory to the system and places each block in the smallest hole that fits it.

    Attributes:
        extent: Bytes from the heap's start to its highest end so far.
    """

    def __init__(self) -> None:
        self.extent = 0
        self._by_size: list[tuple[int, int]] = []  # bytes and start of each hole
        self._sizes: dict[int, int] = {}  # bytes of a hole by its start
        self._begins: dict[int, int] = {}  # start of a hole by its end
        self._blocks: dict[int, tuple[int, int]] = {}  # start and bytes by the number of a block
        self._taken: deque[int] = deque()  # starts of remainders that small objects occupy, oldest first
        self._most_taken = _TAKEN
        self._cached: list[int] = []  # starts of remainders that malloc caches

    def run(self, log: Iterable[tuple[int, int]]) -> None:
        """Replay the allocations of a step, then free its blocks that are still allocated.

        Args:
            log: Pairs (number of a memory block, its bytes when it is allocated, or 0 when it is freed), and
                `BLOCK_ENDED`.
        """
        numbers: dict[int, None] = {}
        log = list(log)
        counts = _blocks_until_ends(log)
        self._most_taken = _TAKEN if counts.popleft() <= _LOOP else _TAKEN_IN_LOOP
        for number, nbytes in log:
            if number == BLOCK_ENDED[0]:
                self._release()
                self._most_taken = _TAKEN if counts.popleft() <= _LOOP else _TAKEN_IN_LOOP
            elif nbytes:
                self.allocate(number, nbytes)
                numbers[number] = None
            elif number in numbers:
                del numbers[number]
                self._free(number)
        for number in numbers:
            self._free(number)
        self._release()

    def allocate(self, number: int, nbytes: int) -> None:
        """Place a memory block of `nbytes` under `number`. Blocks of other callers than `run` are never freed."""
        chunk = max(_SMALLEST, -(-(nbytes + _HEADER) // _GRAIN) * _GRAIN)
        needed = chunk + _REMAINDER
        at = bisect_left(self._by_size, (needed, 0))
        if at < len(self._by_size):
            size, begin = self._by_size[at]
            self._take(begin)
            if size > needed:
                self._give(begin + needed, size - needed)
        else:
            begin = self._begins.get(self.extent, self.extent)  # a hole at the end grows
            if begin < self.extent:
                self._take(begin)
            self.extent = begin + needed
        self._blocks[number] = begin, chunk
        self._taken.append(begin + chunk)
        while len(self._taken) > self._most_taken:
            self._give(self._taken.popleft(), _REMAINDER)

    def _free(self, number: int) -> None:
        self._give(*self._blocks.pop(number))

    def _release(self) -> None:
        """Free the remainders that small objects occupy, except those that malloc caches."""
        remainders = [*self._cached, *self._taken]
        self._cached = remainders[-_CACHED:]
        self._taken.clear()
        for begin in remainders[:-_CACHED]:
            self._give(begin, _REMAINDER)

    def _give(self, begin: int, size: int) -> None:
        """Add a hole, and join it with adjacent holes."""
        before = self._begins.get(begin)
        if before is not None:
            size += self._take(before)
            begin = before
        if begin + size in self._sizes:
            size += self._take(begin + size)
        self._sizes[begin], self._begins[begin + size] = size, begin
        insort(self._by_size, (size, begin))

    def _take(self, begin: int) -> int:
        """Remove a hole. Return its bytes."""
        size = self._sizes.pop(begin)
        del self._begins[begin + size]
        del self._by_size[bisect_left(self._by_size, (size, begin))]
        return size


def _blocks_until_ends(log: list[tuple[int, int]]) -> deque[int]:
    """Return the number of allocated blocks before each end of a module, and after the last end."""
    counts = deque([0])
    for number, nbytes in log:
        if number == BLOCK_ENDED[0]:
            counts.append(0)
        elif nbytes:
            counts[-1] += 1
    return counts
