"""Gathers of buffers that peers do not map, through a few windows that they do."""

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
"""A rank may show one gather more than its slowest peer has taken."""
COUNTERS = 2 + WINDOWS
"""How many of the counters: gathers shown, gathers taken, and whose buffer is in each window."""


@dataclass(eq=False)
class _WindowGather:
    number: int
    buffer: TransportBuffer
    ready: Pending
    elements: int
    shown: bool = False


class GatherWindows:
    """Gathers in the order in which they were started, which is one on all ranks.

    Each rank copies its cut into the next window once all peers have read what that showed before, and theirs from
    their windows. Nobody waits for a peer to join before a gather is asked for; and memory that comes and goes is no
    peer's: to give back what peers map, and to take it again, is slow (see `Pages`).

    Args:
        blocks: bytes of every window of every rank, `[window][rank]`.
        counters, base: `COUNTERS` of them from `base` on.
    """

    def __init__(
        self, group: RankGroup, blocks: list[list[torch.Tensor]], counters: Counters, base: int, traffic: Traffic
    ) -> None:
        self._group, self._blocks, self._counters, self._base, self._traffic = group, blocks, counters, base, traffic
        self._queue: deque[_WindowGather] = deque()
        self._started = self._taken = 0

    def gather(self, buffer: TransportBuffer, ready: Pending, elements: int) -> Pending:
        """Start a gather of `buffer`, in which this rank's own cut is there once `ready`."""
        self._started += 1
        self._queue.append(_WindowGather(self._started, buffer, ready, elements))
        self.advance(self._started, wait=False)
        return _WindowPending(self, self._started)

    def advance(self, number: int, *, wait: bool) -> bool:
        """Go on with the gathers up to the `number`-th; returns whether that is finished, as it is after `wait`.

        Raises:
            CommunicationError: peers gather something else, or one is not there.
        """
        for one in list(self._queue):  # show before taking: a peer may wait for it
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
    """The beginning of a window, as a tensor like `values`."""
    return window[: values.numel() * values.element_size()].view(values.dtype)
