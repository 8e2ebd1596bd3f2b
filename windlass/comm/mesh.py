"""Process groups of all mesh axes, and the groups over which parameters are sharded and their gradients reduced."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import finalize

import torch.distributed as dist

from windlass.base.errors import ConfigError
from windlass.comm.group_creation import new_process_group
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.mesh_shape import AXES, DATA_AXES, EXPERT_DATA_AXES, MeshShape
from windlass.comm.mpi_library import BACKEND as MPI_BACKEND
from windlass.comm.rank_group import DataMesh, RankGroup, close_process_groups

# Group of this rank alone, if it exists. Created once, because torch may generate the same name for a second group.
_alone: list[Any] = []


def _own(rank: int, timeout: timedelta | None) -> Any:
    """Return the process group of this rank alone. It is destroyed with the default group."""
    if _alone:
        with contextlib.suppress(ValueError):  # the group was destroyed together with the default group
            if dist.get_rank(_alone[0]) == 0 and dist.get_process_group_ranks(_alone[0]) == [rank]:
                return _alone[0]
        _alone.clear()
    _alone.append(new_process_group([rank], timeout=timeout, use_local_synchronization=True))
    return _alone[0]


class _GroupMaker:
    """Cache of process groups: creates each partition of the ranks once.

    Collective: all ranks request the same partitions in the same order.
    """

    def __init__(self, grid: MeshShape, timeout: timedelta | None) -> None:
        self._grid, self._timeout, self._rank = grid, timeout, dist.get_rank()
        self._found: dict[tuple[tuple[tuple[int, ...], ...], bool], RankGroup] = {}
        # True if the default group's backend supports CPU tensors; otherwise CPU tensors need a separate group.
        self._talks = any(name in dist.get_backend_config() for name in ("gloo", MPI_BACKEND))

    @property
    def made(self) -> list[RankGroup]:
        return list(self._found.values())

    def over(self, *axes: str) -> RankGroup:
        """Return this rank's group of the ranks that differ only along these axes."""
        return self.of(self._grid.groups(*axes))

    def of(self, partition: list[tuple[int, ...]], *, is_second: bool = False) -> RankGroup:
        """Return this rank's group in a partition of all ranks.

        Args:
            is_second: True for a second group of the same ranks, with separate connections.
        """
        key = tuple(partition), is_second
        if key not in self._found:
            self._found[key] = self._make(partition)
        return self._found[key]

    def _make(self, partition: list[tuple[int, ...]]) -> RankGroup:
        local: RankGroup | None = None
        for ranks in partition:
            if len(ranks) == 1:  # the group's only rank creates it without the other ranks
                if ranks == (self._rank,):
                    local = RankGroup(_own(self._rank, self._timeout), ranks, 0)
                continue
            # `new_group` is collective over all ranks, so every rank creates the groups of the others too.
            process_group = new_process_group(ranks, timeout=self._timeout)
            cpu_group = None if self._talks else new_process_group(ranks, timeout=self._timeout, backend="gloo")
            if self._rank in ranks:
                local = RankGroup(process_group, ranks, ranks.index(self._rank), cpu_group)
        assert local is not None, f"rank {self._rank} is in none of {partition}"
        if local.size > 1:
            # Modules still communicate along tp, ep and sp after their engine is destroyed, so a group is closed only
            # when no object refers to it.
            finalize(local, close_process_groups, local.process_group, local.cpu_process_group).atexit = False
        return local


@dataclass(frozen=True)
class Mesh:
    """Mesh of ranks, from the view of one rank.

    Attributes:
        grid: Sizes of the axes.
        world: All ranks.
        dense: Data ranks of dense parameters.
        experts: Data ranks of experts; `dense` itself if ep is 1.
        axes: Axes pp, ep, sp and tp, by name.
        stages: Axis over each set of pipeline stages that share a parameter, with these stages as key; see
            `add_stage_group`.
    """

    grid: MeshShape
    world: RankGroup
    dense: DataMesh
    experts: DataMesh
    axes: dict[str, MeshAxis]
    stages: dict[tuple[int, ...], MeshAxis] = field(default_factory=dict)
    _maker: _GroupMaker | None = None

    @property
    def pp(self) -> MeshAxis:
        return self.axes["pp"]

    @property
    def ep(self) -> MeshAxis:
        return self.axes["ep"]

    @property
    def sp(self) -> MeshAxis:
        return self.axes["sp"]

    @property
    def tp(self) -> MeshAxis:
        return self.axes["tp"]

    @property
    def coordinates(self) -> dict[str, int]:
        """Coordinate of this rank along each axis."""
        return self.grid.coordinates(self.world.ranks[self.world.index])

    @property
    def first_of_stage(self) -> bool:
        """True on the first rank of each pipeline stage."""
        return self.dense.data.index == 0 and self.tp.index == 0

    @property
    def only_data(self) -> bool:
        """True if every rank is a data rank of every parameter."""
        return self.dense.data.size == self.world.size and self.experts is self.dense

    def gather_from_world(self, value: Any) -> list[Any]:
        """All-gather a plain Python value from all ranks. Collective.

        If `only_data`, the value must be the same on all ranks; the list then has only this rank's value.
        """
        if self.only_data:
            return [value]
        return self.world.all_gather_object(value)

    def of_stages(self, value: Any) -> list[Any]:
        """Return the plain Python value of the first rank of each pipeline stage, in order of the stages.

        With one stage, return only this rank's value. Collective over all ranks.
        """
        if self.pp.size == 1:
            return [value]
        values = self.gather_from_world(value if self.first_of_stage else None)
        return values[:: self.grid.world // self.grid.pp]  # pp is the outermost axis

    def over(self, *axes: str) -> RankGroup:
        """Return this rank's group of the ranks that differ only along these axes.

        Collective over all ranks, with the same axes.
        """
        assert self._maker is not None
        return self._maker.over(*axes)

    def second_data_group(self) -> RankGroup:
        """Return a second group of the dense data ranks, whose transfers do not delay those of `dense`.

        On one connection a small collective waits behind megabytes that were sent before. Collective over all ranks at
        the first call.
        """
        assert self._maker is not None
        return self._maker.of(self.grid.groups(*DATA_AXES), is_second=True)

    def add_stage_group(self, stages: tuple[int, ...]) -> None:
        """Create the axis over these pipeline stages, and add it to `self.stages`.

        On ranks of other stages, the axis has one rank. Collective over all ranks, with the same `stages`.
        """
        assert self._maker is not None
        partition: list[tuple[int, ...]] = []
        for column in self.grid.groups("pp"):
            partition += [tuple(column[stage] for stage in stages)]
            # Ranks of other stages are in groups of one, because a partition contains every rank.
            partition += [(rank,) for stage, rank in enumerate(column) if stage not in stages]
        self.stages[stages] = MeshAxis("pp", self._maker.of(partition))

    def close_with_model(self) -> None:
        """Close the groups' sockets, unless modules communicate along tp, ep or sp.

        In that case a group is closed when no object refers to it. Pipeline stages communicate only through their
        engine.
        """
        if self.tp.size == self.ep.size == self.sp.size == 1:
            self.close()

    def close(self) -> None:
        """Close the groups' sockets. No rank may communicate over them afterwards."""
        for group in self._maker.made if self._maker is not None else ():
            if group.size > 1:
                group.destroy()


def build_mesh(grid: MeshShape, *, regather: int | None = None, timeout: timedelta | None = None) -> Mesh:
    """Create the mesh over all ranks. Collective.

    Args:
        regather: Number of consecutive data ranks that shard a second copy of the parameters (hpZ). No second copy if
            None, 1 or the number of data ranks.
        timeout: Time after which a collective fails if a peer does not join; None: torch's default (nccl: 10 minutes).

    Raises:
        ConfigError: the product of the axis sizes is not the world size, or `regather` does not divide the number of
            data ranks.
    """
    world = dist.get_world_size()
    if grid.world != world:
        raise ConfigError(f"the mesh {grid} has {grid.world} ranks, but the job has {world}; start {grid.world} ranks")
    maker = _GroupMaker(grid, timeout)
    everyone = maker.over(*AXES)
    dense = _data_mesh(maker, grid, DATA_AXES, regather)
    experts = dense if grid.ep == 1 else _data_mesh(maker, grid, EXPERT_DATA_AXES, None)
    axes = {name: MeshAxis(name, maker.over(name)) for name in ("pp", "ep", "sp", "tp")}
    everyone.barrier()  # otherwise a rank could fail and close its connections while a peer still connects
    return Mesh(grid, everyone, dense, experts, axes, {}, maker)


def _data_mesh(maker: _GroupMaker, grid: MeshShape, axes: tuple[str, ...], regather: int | None) -> DataMesh:
    data = maker.over(*axes)
    shard = maker.over(*(axis for axis in axes if axis != "dp_replicate"))
    replicate = maker.over("dp_replicate")
    near = None
    if regather is not None and (regather < 1 or data.size % regather):
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size = {regather} does not divide the {data.size} data ranks; "
            "write a divisor"
        )
    if regather is not None and 1 < regather < data.size:
        near = maker.of([part[i : i + regather] for part in grid.groups(*axes) for i in range(0, len(part), regather)])
    return DataMesh(data, shard, replicate, near)
