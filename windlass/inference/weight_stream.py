"""Stream of a model's weights from a weight file through a small staging memory, read ahead of their use.

[Note: streamed weights] The weights of each product (a *streamed unit*) are one range of the weight file. They are read
into a ring of staging memory in the order in which an earlier forward used them (at first in the order of the file), as
far ahead as the ring has room, also for the next forward. A unit's bytes are free again as soon as its product is
computed. If a forward uses a unit that is not in the ring, e.g. another expert, the ring is filled again from this unit
on: the forward is slower, but its result is the same.

An exception such as Ctrl-C may end the wait for a read, which is then still in flight. So its unit keeps its memory
until the next forward has finished the read. If the exception ends the start of a read, the source is closed, which
ends all reads, and the next forward opens it again.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from windlass.base.errors import ConfigError
from windlass.storage.extent_allocator import page_up

_READ_AHEAD = 64 << 20  # bytes in flight that keep a fast disk busy


class Read(Protocol):
    """Read of a unit, in flight or finished."""

    def wait(self) -> None:
        """Wait until the bytes have arrived, and raise if they cannot be read."""
        ...

    def finish(self) -> None:
        """Wait until the read no longer writes to its memory. Do not raise if the read has failed."""
        ...


class WeightSource(Protocol):
    """Storage from which the weights of each unit are read; see [Note: streamed weights]."""

    def allocate_buffer(self, nbytes: int) -> torch.Tensor:
        """Return `[nbytes]` uint8 staging memory."""
        ...

    def start(self, unit: int, into: torch.Tensor) -> Read:
        """Start to read a unit into the uint8 memory `into`, and return the read."""
        ...

    def close(self) -> None:
        """Wait until no read writes to memory any more. Later reads raise."""
        ...

    def reopen(self) -> None:
        """Read again after `close`, and raise if that is not possible."""
        ...


@dataclass(eq=False)
class _Staged:
    """Unit in staging memory, whose read may be in flight."""

    unit: int
    first: int
    nbytes: int
    read: Read
    memory: torch.Tensor
    in_use: bool = False
    released: bool = False


@dataclass
class StreamStats:
    """Counters of a stream.

    Attributes:
        bytes_read: bytes of all reads that have started; for a mapped file, the bytes of a unit are added at each use.
        waited_seconds: seconds in which products waited for their weights.
        mispredicted: number of units that were not read ahead.
    """

    bytes_read: int = 0
    waited_seconds: float = 0.0
    mispredicted: int = 0


class WeightStream:
    """Reader of units ahead of their use, into a ring of staging memory; see [Note: streamed weights]. Not thread-safe.

    Args:
        sizes: bytes of each unit, by its number.
        buffer_bytes: bytes of the staging memory; None: the default of `EngineOptions.weights_buffer_bytes`.

    Raises:
        ConfigError: the staging memory cannot hold the largest unit.
    """

    def __init__(self, source: WeightSource, sizes: Sequence[int], buffer_bytes: int | None = None) -> None:
        self._source = source
        self._sizes = [page_up(size) for size in sizes]
        largest = max(self._sizes, default=1)
        # Room for the unit in use and the next one, at any offset of the ring.
        least = min(largest * 3, max(sum(self._sizes), 1))
        if buffer_bytes is not None and buffer_bytes < largest:
            raise ConfigError(
                f"weights_buffer_bytes is {buffer_bytes}, and the largest product has {largest} bytes of weights; "
                f"write at least that, or {least} so that the next ones are read ahead"
            )
        # Limit the ring to a quarter of the weights: a larger one saves no reads, as each forward reads each byte once.
        wanted = max(least, min(_READ_AHEAD + largest, page_up(sum(self._sizes) // 4)))
        self.buffer_bytes = wanted if buffer_bytes is None else page_up(buffer_bytes + 1) - 4096
        self._buffer = source.allocate_buffer(self.buffer_bytes)
        self._staged: deque[_Staged] = deque()
        self._outside: deque[_Staged] = deque()  # units with memory outside of the ring
        self._order = list(range(len(self._sizes)))
        self._used: list[int] = []
        self._next = 0  # index in `_order` of the next unit to read
        self._reads, self._failed, self._source_closed = True, False, False
        # if the stream is garbage-collected: wait for reads in flight before their memory is freed
        self._finish = weakref.finalize(self, _finish_reads, self._staged, self._outside, self._buffer)
        self.stats = StreamStats()

    def begin_forward(self) -> None:
        """Start reads in the predicted order: the order of the last forward, or the previous prediction if the last
        forward used a subsequence of it.
        """
        if not self._reads:
            return
        used, self._used = self._used, []
        if self._source_closed:
            self._source.reopen()
            self._source_closed = False
        if self._failed:  # drop all other reads, which may have failed too
            self._drop_unused()
            self._failed, self._next = False, 0
        if used and not _is_part(used, self._order):
            self._drop_unused()
            self._order, self._next = used, 0
        self._fill()

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """Inside the `with` block, let `lend` yield staging memory of undefined content, without a read."""
        self._reads = False
        try:
            yield
        finally:
            self._reads = True

    @contextmanager
    def lend(self, unit: int) -> Iterator[torch.Tensor]:
        """Yield the bytes of a unit, which are valid inside the `with` block.

        Raises:
            StorageError: the bytes cannot be read. The next forward tries again.
        """
        if not self._reads:
            yield self._buffer[: self._sizes[unit]]
            return
        staged = self._find(unit)
        self._used.append(unit)
        began = time.perf_counter()
        try:
            staged.read.wait()
        except BaseException:
            self._failed = True
            raise
        finally:
            self.stats.waited_seconds += time.perf_counter() - began
        try:
            staged.in_use = True
            yield staged.memory
        finally:
            staged.released = True
            for units in (self._staged, self._outside):
                while units and units[0].released:
                    units.popleft()
            if not self._failed:
                self._fill()

    def close(self) -> None:
        """Wait for reads in flight and free the staging memory."""
        _finish_reads(self._staged, self._outside, self._buffer)
        self._finish.detach()
        self._staged.clear()
        self._outside.clear()
        self._order = []
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _find(self, unit: int) -> _Staged:
        """Return a unit in the ring, and drop the unused units before it: this forward has skipped them. If the unit is
        not in the ring, drop all unused units and start to read the missing one.
        """
        waiting = [staged for staged in self._staged if not staged.in_use]
        place = next((number for number, staged in enumerate(waiting) if staged.unit == unit), None)
        if place is not None:
            for staged in waiting[:place]:
                staged.read.finish()
                staged.in_use = staged.released = True
            return waiting[place]
        self.stats.mispredicted += 1
        self._drop_unused()
        self._next = self._place_after(unit)
        found = self._start(unit)
        if found is None:  # units in use fill the ring, so memory outside of it is used
            return self._start_read(unit, 0, self._source.allocate_buffer(self._sizes[unit]), self._outside)
        self._fill()
        return found

    def _place_after(self, unit: int) -> int:
        """Return the index in `_order` after the next use of a unit; `_next` if `_order` lacks the unit."""
        count = len(self._order)
        for step in range(count):
            if self._order[(self._next + step) % count] == unit:
                return (self._next + step + 1) % count
        return self._next

    def _drop_unused(self) -> None:
        for units in (self._staged, self._outside):
            for staged in units:
                if not staged.in_use:
                    staged.read.finish()
            kept = [staged for staged in units if staged.in_use]
            units.clear()
            units += kept

    def _fill(self) -> None:
        """Start reads in the predicted order while the ring has room."""
        while self._order and self._start(self._order[self._next]) is not None:
            self._next = (self._next + 1) % len(self._order)

    def _start(self, unit: int) -> _Staged | None:
        nbytes = self._sizes[unit]
        first = self._find_room(nbytes)
        if first is None:
            return None
        return self._start_read(unit, first, self._buffer[first : first + nbytes], self._staged)

    def _start_read(self, unit: int, first: int, memory: torch.Tensor, units: deque[_Staged]) -> _Staged:
        """Start to read a unit into `memory`, and append it to `units`."""
        try:
            units.append(_Staged(unit, first, memory.numel(), self._source.start(unit, memory), memory))
        except BaseException:  # e.g. Ctrl-C after the read has started: nothing else would wait for it
            self._failed = self._source_closed = True
            self._source.close()
            raise
        self.stats.bytes_read += memory.numel()
        return units[-1]

    def _find_room(self, nbytes: int) -> int | None:
        """Return the offset of free bytes behind the last unit, or at the start of the ring; None: too few are free."""
        if not self._staged:
            return 0 if nbytes <= self.buffer_bytes else None
        head = self._staged[0].first
        tail = self._staged[-1].first + self._staged[-1].nbytes
        if tail > head:  # the bytes [head, tail) are in use
            if tail + nbytes <= self.buffer_bytes:
                return tail
            return 0 if nbytes <= head else None
        return tail if tail + nbytes <= head else None


def _finish_reads(staged: Iterable[_Staged], outside: Iterable[_Staged], buffer: torch.Tensor) -> None:
    for one in (*staged, *outside):
        one.read.finish()


def _is_part(used: Sequence[int], order: Sequence[int]) -> bool:
    """Return True if `used` is a subsequence of `order`."""
    rest = iter(order)
    return all(unit in rest for unit in used)
