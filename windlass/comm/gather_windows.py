"""Gather windows: shared memory through which ranks gather buffers that their peers do not map."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from windlass.base.errors import CommunicationError
from windlass.base.pending import Pending
from windlass.comm.rank_group import RankGroup
from windlass.comm.shared_memory import Counters
from windlass.comm.traffic import Traffic
from windlass.comm.transport import TransportBuffer, local_shard

WINDOWS = 2
"""Number of windows, and of gathers that a rank may publish before its slowest peer has read the first of them."""
COUNTERS = 2 + WINDOWS
"""Number of counters: gathers published, gathers read, and the key of the buffer in each window."""


@dataclass(eq=False)
class _WindowGather:
    number: int
    buffer: TransportBuffer
    ready: Pending
    elements: int
    shown: bool = False


class GatherWindows:
    """All-gathers through shared windows, run in the order of their start, which is equal on all ranks.

    Each rank copies its shard into the next window once all peers have read the window's previous content, and reads
    the peers' shards from their windows. A gather starts without waiting for the peers. Peers do not map memory that is
    freed and allocated again, because shared memory is slow to free and allocate (see `AnonymousPages`).

    Args:
        blocks: uint8 tensor of each window of each rank, `[window][rank]`.
        counters: Shared counters.
        base: Index of the first of the `COUNTERS` counters that the windows use.
    """

    def __init__(
        self, group: RankGroup, blocks: list[list[torch.Tensor]], counters: Counters, base: int, traffic: Traffic
    ) -> None:
        self._group, self._blocks, self._counters, self._base, self._traffic = group, blocks, counters, base, traffic
        self._queue: deque[_WindowGather] = deque()
        self._started = self._taken = 0

    def gather(self, buffer: TransportBuffer, ready: Pending, elements: int) -> Pending:
        """Start a gather of `buffer`. This rank's shard is in place once `ready` has completed."""
        self._started += 1
        self._queue.append(_WindowGather(self._started, buffer, ready, elements))
        self.advance(self._started, wait=False)
        return _WindowPending(self, self._started)

    def advance(self, number: int, *, wait: bool) -> bool:
        """Advance the gathers up to the `number`-th.

        Return True if the `number`-th gather is finished. With `wait`, block until it is.

        Raises:
            CommunicationError: a peer gathers another buffer; with `wait`, also: a peer died, or the time-out passed.
        """
        for one in list(self._queue):  # publish before reading: a peer may wait for this shard
            if one.number > number or not (one.shown or self._show(one, wait=wait and one is self._queue[0])):
                break
        while self._queue and self._taken < number:
            first = self._queue[0]
            if not (first.shown or self._show(first, wait=wait)) or not self._take(first, wait=wait):
                return False
            self._queue.popleft()
        return self._taken >= number

    def _show(self, one: _WindowGather, *, wait: bool) -> bool:
        if wait:
            one.ready.wait()
            self._counters.wait(self._base + 1, one.number - WINDOWS, "the previous gather")
        elif not (one.ready.poll() and self._counters.reached(self._base + 1, one.number - WINDOWS)):
            return False
        window, own = one.number % WINDOWS, local_shard(one.buffer.local, self._group.index, self._group.size)
        # The window may be larger than this shard.
        _like(self._blocks[window][self._group.index], own).copy_(own)
        self._counters.set(self._base + 2 + window, one.buffer.key)
        # Raise this counter last: it makes the window visible to peers.
        self._counters.raise_to(self._base, one.number)
        one.shown = True
        return True

    def _take(self, one: _WindowGather, *, wait: bool) -> bool:
        if wait:
            self._counters.wait(self._base, one.number, "a gather")
        elif not self._counters.reached(self._base, one.number):
            return False
        window, moved = one.number % WINDOWS, 0
        for index in range(self._group.size):
            if index == self._group.index:
                continue
            # The key detects ranks that gather in different orders, before wrong values are used.
            if self._counters.read(index, self._base + 2 + window) != one.buffer.key:
                raise CommunicationError(
                    f"rank {self._group.ranks[index]} and this rank {self._group.ranks[self._group.index]} "
                    "all-gather parameters in different orders, which is an error of windlass; start the run again "
                    "from its last checkpoint, and report this message"
                )
            into = local_shard(one.buffer.local, index, self._group.size)
            into.copy_(_like(self._blocks[window][index], into))
            moved += into.numel() * into.element_size()
        self._taken = one.number
        # Peers may now overwrite their windows.
        self._counters.raise_to(self._base + 1, one.number)
        self._traffic.add("gather", one.elements, moved)
        return True


class _WindowPending:
    def __init__(self, windows: GatherWindows, number: int) -> None:
        self._windows, self._number = windows, number

    def poll(self) -> bool:
        return self._windows.advance(self._number, wait=False)

    def wait(self) -> None:
        self._windows.advance(self._number, wait=True)


def _like(window: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the start of a window as a tensor of the size and dtype of `values`."""
    return window[: values.numel() * values.element_size()].view(values.dtype)
