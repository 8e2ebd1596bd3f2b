"""Where each rank sits on the axes of the mesh: arithmetic alone, for worlds of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from windlass.base.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "sp", "tp")
"""The axes, outermost first: neighbouring ranks, which share a node, differ in the last ones."""

DATA_AXES = ("dp_replicate", "dp_shard", "ep", "sp")
"""Axes over which gradients of dense parameters are reduced: their ranks see other tokens."""

EXPERT_DATA_AXES = ("dp_replicate", "dp_shard", "sp")
"""As `DATA`, of parameters of experts: ranks along `ep` hold other experts."""

DATA_LOADING_AXES = ("dp_replicate", "dp_shard", "ep")
"""Axes whose ranks read other samples; those along sp read other parts of the same, all others the same."""


@dataclass(frozen=True)
class MeshShape:
    """The sizes of all axes, and what follows from them about ranks.

    Ranks count along the axes of `AXES` like digits, tp fastest. `ep` splits the data ranks: dense parameters are
    reduced over it, experts are not.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    sp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise ConfigError(f"the axis {axis} has {self.size(axis)} ranks; an axis has at least 1")

    @cached_property
    def world(self) -> int:
        """Ranks in all."""
        return self.size(*AXES)

    @property
    def data(self) -> int:
        """Ranks over which a dense parameter is reduced."""
        return self.size(*DATA_AXES)

    @property
    def data_loading_size(self) -> int:
        """Ranks that read samples of their own."""
        return self.size(*DATA_LOADING_AXES)

    def size(self, *axes: str) -> int:
        """Ranks along these axes together."""
        return math.prod(int(getattr(self, axis)) for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` sits: its place along each axis.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} does not lie in a world of {self.world}")
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.size(axis))
        return {axis: found[axis] for axis in AXES}

    def rank(self, **places: int) -> int:
        """The rank that sits there; 0 along the axes that are left out.

        Raises:
            ValueError: there is no such axis, or no such place on one.
        """
        for axis, place in places.items():
            if axis not in AXES or not 0 <= place < self.size(axis):
                raise ValueError(f"{axis} = {place}: the axes are {self}")
        rank = 0
        for axis in AXES:
            rank = rank * self.size(axis) + places.get(axis, 0)
        return rank

    def data_loading_rank(self, rank: int) -> int:
        """Which of the readers a rank is: those along pp, sp and tp read the same samples."""
        places, number = self.coordinates(rank), 0
        for axis in DATA_LOADING_AXES:
            number = number * self.size(axis) + places[axis]
        return number

    def along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` in these axes alone, itself among them, in ascending order."""
        here = self.coordinates(rank)
        spans: list[Sequence[int]] = [range(self.size(axis)) if axis in axes else (here[axis],) for axis in AXES]
        return tuple(self.rank(**dict(zip(AXES, places, strict=True))) for places in product(*spans))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All ranks, in groups of those that differ in these axes alone; in the order of their first ranks."""
        others = [range(self.size(axis)) if axis not in axes else (0,) for axis in AXES]
        firsts = (self.rank(**dict(zip(AXES, places, strict=True))) for places in product(*others))
        return [self.along(first, *axes) for first in firsts]

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.size(axis)}" for axis in AXES)
