"""All-gather of buffers that peers do not map, through a few shared windows."""

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
"""Number of windows: a rank may publish one all-gather more than its slowest peer has read."""
COUNTERS = 2 + WINDOWS
"""Number of counters: all-gathers published, all-gathers read, and the key of the buffer in each window."""


@dataclass(eq=False)
class _WindowGather:
    number: int
    buffer: TransportBuffer
    ready: Pending
    elements: int
    shown: bool = False


class GatherWindows:
    """All-gathers in the order in which they were started, which is equal on all ranks.

    Each rank copies its shard into the next window, once all peers have read the window's previous content, and
    copies the peers' shards from their windows. Starting an all-gather does not wait for peers. Peers do not map
    the buffers themselves, because freeing and reallocating mapped memory is slow (see `AnonymousPages`).

    Args:
        blocks: bytes of every window of every rank, `[window][rank]`.
        counters, base: counters to use: `COUNTERS` of them, from `base` on.
    """

    def __init__(
        self, group: RankGroup, blocks: list[list[torch.Tensor]], counters: Counters, base: int, traffic: Traffic
    ) -> None:
        self._group, self._blocks, self._counters, self._base, self._traffic = group, blocks, counters, base, traffic
        self._queue: deque[_WindowGather] = deque()
        self._started = self._taken = 0

    def gather(self, buffer: TransportBuffer, ready: Pending, elements: int) -> Pending:
        """Start an all-gather of `buffer`, which holds this rank's shard once `ready` is done."""
        self._started += 1
        self._queue.append(_WindowGather(self._started, buffer, ready, elements))
        self.advance(self._started, wait=False)
        return _WindowPending(self, self._started)

    def advance(self, number: int, *, wait: bool) -> bool:
        """Continue the all-gathers up to the `number`-th. Return True if that one is complete, as it always is with
        `wait`.

        Raises:
            CommunicationError: peers gather another buffer, or a peer is missing.
        """
        for one in list(self._queue):  # publish before reading, because a peer may wait for this shard
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
            self._counters.wait(self._base + 1, one.number - WINDOWS, "the gather before")
        elif not (one.ready.poll() and self._counters.reached(self._base + 1, one.number - WINDOWS)):
            return False
        window, own = one.number % WINDOWS, local_shard(one.buffer.local, self._group.index, self._group.size)
        _like(self._blocks[window][self._group.index], own).copy_(own)
        self._counters.set(self._base + 2 + window, one.buffer.key)
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
            if self._counters.read(index, self._base + 2 + window) != one.buffer.key:
                raise CommunicationError(
                    f"rank {self._group.ranks[index]} and this rank {self._group.ranks[self._group.index]} gather "
                    "parameters in different orders, which [Note: agreed order] rules out: please report this"
                )
            into = local_shard(one.buffer.local, index, self._group.size)
            into.copy_(_like(self._blocks[window][index], into))
            moved += into.numel() * into.element_size()
        self._taken = one.number
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
    """Return the beginning of a window as a flat tensor with the size and dtype of `values`."""
    return window[: values.numel() * values.element_size()].view(values.dtype)
