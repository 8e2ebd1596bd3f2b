"""Where the ranks of a group tell each other a few numbers, in no time: what the agreed order of collectives is made
of."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from windlass.comm.rank_group import RankGroup
from windlass.comm.shared_memory import Counters

WIDTH = 32  # numbers that shared memory shows at once
COUNTERS = 1 + 2 * WIDTH
"""How many of the counters: exchanges begun, and the numbers of this one and of the one before."""


class Posted(Protocol):
    """Numbers that this rank has told, and will hear of the others."""

    def poll(self) -> bool:
        """Whether all have told theirs."""
        ...

    def wait(self) -> list[list[int]]:
        """Every rank's numbers, in group order."""
        ...


class AgreementBoard(Protocol):
    """Small exchanges over one group, which never get between the collectives of a transport."""

    def post(self, mine: list[int], what: str) -> Posted:
        """Tell the others `mine`, at most `WIDTH` numbers; all tell as many. One exchange after the other: this one is
        to be waited for before the next.

        Args:
            what: is waited for, should a peer not come.
        """
        ...

    def exchange(self, mine: list[int], what: str) -> list[list[int]]:
        """Every rank's numbers, any count of them, in group order. Collective; all tell as many."""
        ...


class SharedMemoryBoard:
    """On counters in shared memory: some microseconds, where all ranks are there.

    Numbers lie in two places in turn. Who shows those of one exchange has seen all of the one before; so everybody has
    read what was shown before that, and its place may be written again.

    Args:
        counters, base: `COUNTERS` of them from `base` on.
    """

    def __init__(self, group: RankGroup, counters: Counters, base: int) -> None:
        self._group, self._counters, self._base = group, counters, base
        self._turn = 0

    def post(self, mine: list[int], what: str) -> Posted:
        self._turn += 1
        place = self._base + 1 + self._turn % 2 * WIDTH
        for at, number in enumerate(mine):
            self._counters.set(place + at, number)
        self._counters.raise_to(self._base, self._turn)
        return _PostedCounters(self, self._turn, len(mine), what)

    def exchange(self, mine: list[int], what: str) -> list[list[int]]:
        told: list[list[int]] = [[] for _ in range(self._group.size)]
        for start in range(0, len(mine), WIDTH):
            for numbers, more in zip(told, self.post(mine[start : start + WIDTH], what).wait(), strict=True):
                numbers += more
        return told

    def shown(self, turn: int) -> bool:
        """Whether all have told their numbers of an exchange."""
        return self._counters.reached(self._base, turn)

    def read(self, turn: int, count: int, what: str) -> list[list[int]]:
        """Every rank's numbers of the last exchange, once all have told them."""
        self._counters.wait(self._base, turn, what)
        place = self._base + 1 + turn % 2 * WIDTH
        return [[self._counters.read(rank, place + at) for at in range(count)] for rank in range(self._group.size)]


class _PostedCounters:
    def __init__(self, board: SharedMemoryBoard, turn: int, count: int, what: str) -> None:
        self._board, self._turn, self._count, self._what = board, turn, count, what

    def poll(self) -> bool:
        return self._board.shown(self._turn)

    def wait(self) -> list[list[int]]:
        return self._board.read(self._turn, self._count, self._what)


class WireBoard:
    """Over gloo, on the CPU, whatever moves the tensors; no collective of a transport is under way meanwhile."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def post(self, mine: list[int], what: str) -> Posted:
        return _PostedMessages(self._group, mine)

    def exchange(self, mine: list[int], what: str) -> list[list[int]]:
        return self.post(mine, what).wait()


class _PostedMessages:
    def __init__(self, group: RankGroup, mine: list[int]) -> None:
        self._told = [torch.empty(len(mine), dtype=torch.int64) for _ in range(group.size)]
        self._mine = torch.tensor(mine, dtype=torch.int64)
        self._work = dist.all_gather(self._told, self._mine, group=group.cpu_group, async_op=True)

    def poll(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> list[list[int]]:
        if self._work is not None:
            self._work.wait()
        return [numbers.tolist() for numbers in self._told]
