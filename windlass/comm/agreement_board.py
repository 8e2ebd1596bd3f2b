"""Agreement board: fast exchange of a few integers between ranks of a group, to agree on the order of collectives."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from windlass.comm.rank_group import RankGroup
from windlass.comm.shared_memory import Counters

WIDTH = 32  # maximum number of integers in one exchange through shared memory
COUNTERS = 1 + 2 * WIDTH
"""Counters of a board: one for the number of posted exchanges, and `WIDTH` for each of the last two exchanges."""


class Posted(Protocol):
    """Exchange in flight: this rank has posted its integers and will receive the integers of the other ranks."""

    def poll(self) -> bool:
        """Return True if all ranks have posted their integers."""
        ...

    def wait(self) -> list[list[int]]:
        """Wait for the exchange and return every rank's integers, in group order."""
        ...


class AgreementBoard(Protocol):
    """Board for exchanges of a few integers between the ranks of a group, independent of a transport's collectives."""

    def post(self, mine: list[int], what: str) -> Posted:
        """Post `mine`, at most `WIDTH` integers, equally many on all ranks.

        The caller waits for an exchange before it posts the next one.

        Args:
            what: Description of the exchange, for the error if a peer does not arrive.
        """
        ...

    def exchange(self, mine: list[int], what: str) -> list[list[int]]:
        """Return every rank's integers in group order. Collective.

        `mine` may have any number of integers, the same number on all ranks.
        """
        ...


class SharedMemoryBoard:
    """Board on counters in shared memory. An exchange takes some microseconds once all ranks have posted.

    Exchanges alternate between two places. A rank posts exchange n only after it has read exchange n - 1. So once all
    ranks have posted exchange n, exchange n + 1 may overwrite the place of exchange n - 1.

    Args:
        counters: shared counters.
        base: index of the first of the `COUNTERS` counters that the board uses.
    """

    def __init__(self, group: RankGroup, counters: Counters, base: int) -> None:
        self._group, self._counters, self._base = group, counters, base
        self._number = 0

    def post(self, mine: list[int], what: str) -> Posted:
        self._number += 1
        place = self._base + 1 + self._number % 2 * WIDTH
        for at, number in enumerate(mine):
            self._counters.set(place + at, number)
        # Raise this counter last: it makes the integers visible to peers.
        self._counters.raise_to(self._base, self._number)
        return _PostedCounters(self, self._number, len(mine), what)

    def exchange(self, mine: list[int], what: str) -> list[list[int]]:
        values: list[list[int]] = [[] for _ in range(self._group.size)]
        for start in range(0, len(mine), WIDTH):
            for numbers, more in zip(values, self.post(mine[start : start + WIDTH], what).wait(), strict=True):
                numbers += more
        return values

    def shown(self, exchange_number: int) -> bool:
        """Return True if all ranks have posted their integers of this exchange."""
        return self._counters.reached(self._base, exchange_number)

    def read(self, exchange_number: int, count: int, what: str) -> list[list[int]]:
        """Wait until all ranks have posted their integers of this exchange, and return them in group order."""
        self._counters.wait(self._base, exchange_number, what)
        place = self._base + 1 + exchange_number % 2 * WIDTH
        return [[self._counters.read(rank, place + at) for at in range(count)] for rank in range(self._group.size)]


class _PostedCounters:
    def __init__(self, board: SharedMemoryBoard, exchange_number: int, count: int, what: str) -> None:
        self._board, self._number, self._count, self._what = board, exchange_number, count, what

    def poll(self) -> bool:
        return self._board.shown(self._number)

    def wait(self) -> list[list[int]]:
        return self._board.read(self._number, self._count, self._what)


class WireBoard:
    """Board of CPU messages over gloo or MPI, for transports without shared memory."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def post(self, mine: list[int], what: str) -> Posted:
        return _PostedMessages(self._group, mine)

    def exchange(self, mine: list[int], what: str) -> list[list[int]]:
        return _PostedMessages(self._group, mine).wait()


class _PostedMessages:
    def __init__(self, group: RankGroup, mine: list[int]) -> None:
        self._received = [torch.empty(len(mine), dtype=torch.int64) for _ in range(group.size)]
        self._mine = torch.tensor(mine, dtype=torch.int64)
        self._work = dist.all_gather(self._received, self._mine, group=group.cpu_group, async_op=True)

    def poll(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> list[list[int]]:
        if self._work is not None:
            self._work.wait()
        return [numbers.tolist() for numbers in self._received]
