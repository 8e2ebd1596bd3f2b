"""Mesh shape: sizes of all axes, and coordinates of each rank. Pure arithmetic, for worlds of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from windlass.base.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "sp", "tp")
"""Axes, outermost first. Ranks that differ along the last axes are neighbours, usually on one node."""

DATA_AXES = ("dp_replicate", "dp_shard", "ep", "sp")
"""Axes over which gradients of dense parameters are reduced: their ranks process different tokens."""

EXPERT_DATA_AXES = ("dp_replicate", "dp_shard", "sp")
"""Axes over which gradients of experts are reduced. `ep` is missing, because its ranks hold different experts."""

DATA_LOADING_AXES = ("dp_replicate", "dp_shard", "ep")
"""Axes whose ranks read different samples. Ranks along sp read different parts of the same samples; ranks along pp and
tp read the same samples.
"""


@dataclass(frozen=True)
class MeshShape:
    """Sizes of all axes, and the arithmetic of ranks.

    Ranks are numbered in row-major order of `AXES`, so tp varies fastest. `ep` is one of the data-parallel axes:
    gradients of dense parameters are reduced along `ep`, gradients of experts are not.

    Raises:
        ConfigError: a size is less than 1.
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
                raise ConfigError(f"the axis {axis} has {self.size(axis)} ranks; give it at least 1")

    @cached_property
    def world(self) -> int:
        """World size."""
        return self.size(*AXES)

    @property
    def data(self) -> int:
        """Number of ranks over which gradients of dense parameters are reduced."""
        return self.size(*DATA_AXES)

    @property
    def data_loading_size(self) -> int:
        """Number of ranks that read different samples."""
        return self.size(*DATA_LOADING_AXES)

    def size(self, *axes: str) -> int:
        """Return the number of ranks along these axes together."""
        number = 1
        for axis in axes:
            number *= int(getattr(self, axis))
        return number

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` along each axis.

        Raises:
            ValueError: the rank is not in the mesh.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in a world of {self.world}; ranks are numbered from 0")
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.size(axis))
        return {axis: found[axis] for axis in AXES}

    def rank(self, **places: int) -> int:
        """Return the rank at these coordinates; axes that are left out have coordinate 0.

        Raises:
            ValueError: an axis does not exist, or a coordinate is outside of it.
        """
        for axis, place in places.items():
            if axis not in AXES or not 0 <= place < self.size(axis):
                raise ValueError(
                    f"{axis} = {place} is not an index on the axes {self}; pass one from 0 to the size minus 1"
                )
        rank = 0
        for axis in AXES:
            rank = rank * self.size(axis) + places.get(axis, 0)
        return rank

    def data_loading_rank(self, rank: int) -> int:
        """Return the data-loading index of a rank. Ranks along pp, sp and tp have the same index and samples."""
        places, number = self.coordinates(rank), 0
        for axis in DATA_LOADING_AXES:
            number = number * self.size(axis) + places[axis]
        return number

    def along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along these axes, including `rank`, in ascending order."""
        here = self.coordinates(rank)
        spans: list[Sequence[int]] = [range(self.size(axis)) if axis in axes else (here[axis],) for axis in AXES]
        return tuple(self.rank(**dict(zip(AXES, places, strict=True))) for places in product(*spans))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return the groups of ranks that differ only along these axes, ordered by first rank. Each rank is in one."""
        others = [range(self.size(axis)) if axis not in axes else (0,) for axis in AXES]
        firsts = (self.rank(**dict(zip(AXES, places, strict=True))) for places in product(*others))
        return [self.along(first, *axes) for first in firsts]

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.size(axis)}" for axis in AXES)
