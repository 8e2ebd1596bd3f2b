"""Where the ranks of a group tell each other a few numbers, in no time: what the agreed order of collectives is made
of."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from windlass.comm.groups import Group
from windlass.comm.shared_memory import Counters

WIDTH = 32  # numbers that shared memory shows at once
COUNTERS = 1 + 2 * WIDTH
"""How many of the counters: exchanges begun, and the numbers of this one and of the one before."""


class Board(Protocol):
    """Small exchanges over one group, which never get between the collectives of a transport."""

    def exchange(self, mine: list[int], what: str) -> list[list[int]]:
        """Every rank's numbers, in group order. Collective; all tell as many.

        Args:
            what: is waited for, should a peer not come.
        """
        ...


class SharedBoard:
    """On counters in shared memory: some microseconds, where all ranks are there.

    Numbers lie in two places in turn. Who shows those of one exchange has seen all of the one before; so everybody has
    read what was shown before that, and its place may be written again.

    Args:
        counters, base: `COUNTERS` of them from `base` on.
    """

    def __init__(self, group: Group, counters: Counters, base: int) -> None:
        self._group, self._counters, self._base = group, counters, base
        self._turn = 0

    def exchange(self, mine: list[int], what: str) -> list[list[int]]:
        told: list[list[int]] = [[] for _ in range(self._group.size)]
        for start in range(0, len(mine), WIDTH):
            part = mine[start : start + WIDTH]
            self._turn += 1
            place = self._base + 1 + self._turn % 2 * WIDTH
            for at, number in enumerate(part):
                self._counters.set(place + at, number)
            self._counters.raise_to(self._base, self._turn)
            self._counters.wait(self._base, self._turn, what)
            for rank, numbers in enumerate(told):
                numbers += [self._counters.read(rank, place + at) for at in range(len(part))]
        return told


class WireBoard:
    """Over gloo, on the CPU, whatever moves the tensors; no collective of a transport is under way meanwhile."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def exchange(self, mine: list[int], what: str) -> list[list[int]]:
        told = [torch.empty(len(mine), dtype=torch.int64) for _ in range(self._group.size)]
        dist.all_gather(told, torch.tensor(mine, dtype=torch.int64), group=self._group.talks)
        return [numbers.tolist() for numbers in told]
