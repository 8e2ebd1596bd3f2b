"""Ranks arranged in a grid with named axes, with the interface of DeepSpeed's topologies.

`MeshShape` does the same for windlass' own axes; `topology_of` converts one to a `ProcessTopology`.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from windlass.comm.mesh_shape import MeshShape


class ProcessTopology:
    """Row-major numbering of ranks along named axes: the last axis varies fastest.

    Args:
        axes: names of the axes, the slowest first; consecutive ranks differ along the last.
        dims: number of ranks along each axis.

    Raises:
        ValueError: `axes` and `dims` differ in length, a name occurs twice, or a size is below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise ValueError(f"axes {list(axes)} of sizes {list(dims)}: give each name once, with a size of at least 1")
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]  # DeepSpeed's name for it

    @cached_property
    def mapping(self) -> Mapping[Any, int]:
        """Rank at each coordinate tuple."""
        return {place: rank for rank, place in enumerate(self._places())}

    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """Return the axes, the slowest first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along `axis`; 0 if the axis does not exist."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **places: int) -> int:
        """Return the rank at the coordinates `places`, which name every axis.

        Raises:
            ValueError: an axis is missing or unknown, or a coordinate is out of range.
        """
        if set(places) != set(self.axes):
            raise ValueError(
                f"get_rank needs a coordinate on each of {self.axes}, got {list(places)}; filter_match accepts a subset"
            )
        rank = 0
        for axis, dim in zip(self.axes, self.dims, strict=True):
            if not 0 <= places[axis] < dim:
                raise ValueError(f"{axis} = {places[axis]} lies outside of {self}")
            rank = rank * dim + places[axis]
        return rank

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of `rank` as a named tuple.

        Raises:
            ValueError: the rank does not exist.
        """
        if not 0 <= rank < self.world_size():
            raise ValueError(f"rank {rank} not found in topology {self}")
        digits = []
        for dim in reversed(self.dims):
            rank, digit = divmod(rank, dim)
            digits.append(digit)
        return self.ProcessCoord(*reversed(digits))

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return the coordinates of `rank` as part of a file name, e.g. `model_00`, without the axes in `omit_axes`."""
        place = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in shown)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return all groups of ranks that differ only along `axis`; an empty list if the axis does not exist."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        return [
            [self.get_rank(**dict(zip(others, places, strict=True)), **{axis: place}) for place in self._span(axis)]
            for places in product(*(self._span(name) for name in others))
        ]

    def filter_match(self, **places: int) -> list[int]:
        """Return all ranks with the coordinates `places`, in ascending order; [] if a coordinate is out of range.

        `places` may leave out axes.

        Raises:
            ValueError: an axis does not exist.
        """
        if unknown := set(places) - set(self.axes):
            raise ValueError(f"there are no axes {sorted(unknown)}; the axes are {self.axes}")
        spans: list[Sequence[int]] = [[places[axis]] if axis in places else self._span(axis) for axis in self.axes]
        if any(not 0 <= places[axis] < self.get_dim(axis) for axis in places):
            return []
        return [self.get_rank(**dict(zip(self.axes, place, strict=True))) for place in product(*spans)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at coordinate `idx` of `axis`, in ascending order."""
        return self.filter_match(**{axis: idx})

    def __str__(self) -> str:
        return " x ".join(f"{axis} {dim}" for axis, dim in zip(self.axes, self.dims, strict=True))

    def _span(self, axis: str) -> range:
        return range(self.get_dim(axis))

    def _places(self) -> Iterator[Any]:
        return (self.ProcessCoord(*place) for place in product(*(range(dim) for dim in self.dims)))


class PipeDataParallelTopology(ProcessTopology):
    """Topology of pipeline stages and data-parallel copies of each stage.

    The copies of a stage have consecutive ranks, so that gradients are reduced between neighbouring ranks.
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Topology of pipeline stages, data-parallel copies, and ranks over which a stage's matrices are sharded.

    The ranks over which a matrix is sharded are consecutive.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def topology_of(grid: MeshShape) -> ProcessTopology:
    """Return a mesh shape as a DeepSpeed topology: pipe is pp, model is tp.

    The data axis combines dp_replicate, dp_shard, ep and sp.
    """
    return PipeModelDataParallelTopology(num_pp=grid.pp, num_mp=grid.tp, num_dp=grid.data)
